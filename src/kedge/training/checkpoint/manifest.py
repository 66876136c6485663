"""A checkpoint's manifest: what it is, and each file's size and hash, in a spelling that shows any damage."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kedge.errors import DataError
from kedge.training.checkpoint.hashed_files import FileRecord, record_file

__all__ = ["MANIFEST_FILE", "Manifest", "check_files", "read_manifest"]

FORMAT = 1
MANIFEST_FILE = "manifest.json"


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself.

    Attributes:
        update: After which update it was saved, ≥ 0.
        kind: What kind of run it belongs to: `sft`, `reward`, `ppo` …
        fingerprint: What the run was made from, by name: hashes of its data, its models' names …
        kedge_version: Which kedge wrote it.
        files: What every other file is known by.
    """

    update: int
    kind: str
    fingerprint: Mapping[str, str]
    kedge_version: str
    files: Mapping[str, FileRecord]

    def to_bytes(self) -> bytes:
        """The file's contents: JSON with its own hash in it. There is one spelling, so any other byte is damage."""
        return _spelt({"format": FORMAT, **dataclasses.asdict(self)})


def read_manifest(path: Path) -> Manifest:
    """A manifest that is as it was written.

    Raises:
        DataError: It is damaged, or of a format that this version does not know.
        OSError: It cannot be read.
    """
    text = path.read_bytes()
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict) or fields.pop("sha256", None) is None or _spelt(fields) != text:
        raise DataError(f"{path}: is not as it was written")
    if (found := fields.pop("format")) != FORMAT:
        raise DataError(f"{path}: is of format {found}, by kedge {fields['kedge_version']}; this one reads {FORMAT}")
    files = {name: FileRecord(**record) for name, record in fields.pop("files").items()}
    return Manifest(**fields, files=files)


def check_files(folder: Path, files: Mapping[str, FileRecord]) -> None:
    """Compare a checkpoint's files with what its manifest knows of them: names, then sizes, then hashes.

    Raises:
        DataError: Names the first file that is missing, does not belong there, or has other bytes.
        OSError: One cannot be read.
    """
    found = {entry.name for entry in folder.iterdir()} - {MANIFEST_FILE}
    for name in sorted(found ^ files.keys()):
        raise DataError(f"{folder / name}: {'does not belong there' if name in found else 'is missing'}")
    for name, record in files.items():
        size = (folder / name).stat().st_size
        if size != record.size:
            raise DataError(f"{folder / name}: has {size:,} bytes; {record.size:,} were written")
    for name, record in files.items():
        if record_file(folder / name) != record:
            raise DataError(f"{folder / name}: its bytes are not those that were written")


def _spelt(fields: Mapping[str, Any]) -> bytes:
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
    return json.dumps({**fields, "sha256": digest}, sort_keys=True, indent=1).encode()
