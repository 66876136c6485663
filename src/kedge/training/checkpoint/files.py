"""Files with recorded hashes, computed once they are written and checked before reading; tensors as safetensors."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kedge.ranks import Ranks
from kedge.ranks.passes import share_rows
from kedge.ranks.sharding import DTYPES
from kedge_base.errors import DataError
from kedge_base.machine.durable import sync
from kedge_base.run_folder.receipt import file_hash

PIECE_BYTES = 4 * 2**20

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class FileRecord:
    """Size and hash of a file.

    Attributes:
        size: Bytes.
        sha256: SHA-256 of the contents, hexadecimal.
    """

    size: int
    sha256: str


def write_files(folder: Path, contents: Mapping[str, Iterable[bytes | memoryview]]) -> dict[str, FileRecord]:
    """Write new files in pieces and sync them to disk.

    All files are written before the first is synced, because syncing them together takes hardly longer than syncing
    one. No thread hashes them meanwhile: a run may be saved while the interpreter exits, which starts no thread.

    Args:
        folder: The files' folder.
        contents: The files' bytes, by file name.

    Returns:
        The files' records, by file name.

    Raises:
        OSError: A file exists already, or cannot be written.
    """
    with ExitStack() as opened:
        files = {name: opened.enter_context((folder / name).open("xb")) for name in contents}
        for name, pieces in contents.items():
            files[name].writelines(pieces)
            files[name].flush()
        for file in files.values():
            sync(file.fileno())
    return {name: record_file(folder / name) for name in contents}


def record_file(path: Path) -> FileRecord:
    """Compute the record of a file on disk.

    Raises:
        OSError: It cannot be read.
    """
    return FileRecord(path.stat().st_size, file_hash(path))


def record_files(folder: Path) -> dict[str, FileRecord]:
    """Compute the records of all files in a folder and its subfolders, by relative path; errors as in `record_file`."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): record_file(path) for path in paths}


def tensor_pieces(
    tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """Yield a safetensors file of these tensors in pieces, copying one tensor at a time from its device.

    The library's own writer copies all tensors of a GPU to the host's memory before it writes the first one, and
    refuses tensors that share memory or are not contiguous. Here, each such tensor is written in full.

    Args:
        tensors: The tensors, by name.
        metadata: Metadata of the header; transformers expects the format `pt`.

    Raises:
        KeyError: A tensor's dtype is not in `DTYPE_NAMES`.
    """
    # Widest dtypes first, so that every tensor starts at a multiple of its element size.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for name, tensor in ordered:
        start = end
        end = end + tensor.nbytes
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, tensor in ordered:
        numbers = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        # Copies: FSDP cannot free gathered weights that numpy has a view of.
        yield from (piece.clone().numpy().data for piece in numbers.split(PIECE_BYTES))


FORMAT = 3

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
        shards: Number of files of each group of tensors to which every rank wrote its shard.
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
        return _canonical_json({"format": FORMAT, **dataclasses.asdict(self)})


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
    if (found := fields.pop("format", None)) != FORMAT:
        version = fields.get("kedge_version")
        raise DataError(f"{path}: has format {found} of kedge {version}; this version reads format {FORMAT}")
    try:
        files = {name: FileRecord(**record) for name, record in fields.pop("files").items()}
        return Manifest(**fields, files=files)
    except (LookupError, TypeError, AttributeError) as error:  # the hash is right: another version wrote it
        raise DataError(f"{path}: has other fields than this version of kedge reads ({error})") from error


def check_files(folder: Path, files: Mapping[str, FileRecord], ranks: Ranks) -> None:
    """Check a checkpoint's files against its manifest: names, then sizes, then hashes.

    Args:
        folder: The checkpoint.
        files: The records of all files but the manifest.
        ranks: The ranks that share the hashing; each hashes only some of the files.

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
