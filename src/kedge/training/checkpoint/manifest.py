"""A checkpoint's manifest: metadata, the size and hash of every file, and a hash of its own."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kedge.errors import DataError
from kedge.system.ranks import ALONE, Ranks
from kedge.system.ranks.ranks import share_rows
from kedge.training.checkpoint.hashed_files import FileRecord, record_file

__all__ = ["MANIFEST_FILE", "Manifest", "check_files", "read_manifest"]

FORMAT, FORMAT_WITH_SHARDS = 2, 3
READABLE = (1, 2, 3)
"""Format 1 had no model: every tensor was in the file of its group. Format 3 is 2 with groups in several files."""

MANIFEST_FILE = "manifest.json"


@dataclass(frozen=True)
class Manifest:
    """Metadata of a checkpoint.

    Attributes:
        update: The update after which it was saved, ≥ 0.
        kind: Kind of run: `sft`, `reward`, `ppo` …
        fingerprint: The run's inputs by name: hashes of its data, names of its models …
        kedge_version: The version of kedge that wrote it.
        files: Records of all other files, by path relative to the checkpoint.
        held: Tensors that are stored in the checkpoint's model instead of in the file of their group; see `SavedModel`.
        shards: By group of tensors that each rank wrote its part of: the number of files.
    """

    update: int
    kind: str
    fingerprint: Mapping[str, str]
    kedge_version: str
    files: Mapping[str, FileRecord]
    held: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    shards: Mapping[str, int] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """The file's contents: canonical JSON including its own hash, so that any changed byte is detected."""
        fields = dataclasses.asdict(self)
        if not self.shards:  # so that earlier versions of kedge can read it
            del fields["shards"]
        return _canonical_json({"format": FORMAT_WITH_SHARDS if self.shards else FORMAT, **fields})


def read_manifest(path: Path) -> Manifest:
    """Read and verify a manifest.

    Raises:
        DataError: It is damaged, or has an unsupported format.
        OSError: It cannot be read.
    """
    text = path.read_bytes()
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict) or fields.pop("sha256", None) is None or _canonical_json(fields) != text:
        raise DataError(f"{path}: is damaged (its hash does not match)")
    if (found := fields.pop("format", None)) not in READABLE:
        version = fields.get("kedge_version")
        raise DataError(f"{path}: has format {found} of kedge {version}; this version reads format {READABLE[-1]}")
    try:
        files = {name: FileRecord(**record) for name, record in fields.pop("files").items()}
        return Manifest(**fields, files=files)
    except (LookupError, TypeError, AttributeError) as error:  # its hash is right: another version wrote it
        raise DataError(f"{path}: has other fields than this version of kedge reads ({error})") from error


def check_files(folder: Path, files: Mapping[str, FileRecord], ranks: Ranks = ALONE) -> None:
    """Check a checkpoint's files against its manifest: names, then sizes, then hashes.

    Args:
        folder: The checkpoint.
        files: The records of all files but the manifest.
        ranks: Share the hashing out; this rank computes the hashes of its files alone.

    Raises:
        DataError: Names the first file that is missing, unexpected or damaged.
        OSError: A file cannot be read.
    """
    paths = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    found = {path.relative_to(folder).as_posix() for path in paths} - {MANIFEST_FILE}
    for name in sorted(found ^ files.keys()):
        raise DataError(f"{folder / name}: {'is not in the manifest' if name in found else 'is missing'}")
    for name, record in files.items():
        size = (folder / name).stat().st_size
        if size != record.size:
            raise DataError(f"{folder / name}: is damaged ({size:,} bytes, expected {record.size:,})")
    names = sorted(files)
    for name in (names[row] for row in share_rows([files[name].size for name in names], ranks.count)[ranks.number]):
        record = files[name]
        if record_file(folder / name) != record:
            raise DataError(f"{folder / name}: is damaged (its SHA-256 is not the one in the manifest)")


def _canonical_json(fields: Mapping[str, Any]) -> bytes:
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
    return json.dumps({**fields, "sha256": digest}, sort_keys=True, indent=1).encode()
