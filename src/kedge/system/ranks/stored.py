"""The tensors of a checkpoint, read when they are asked for; a file may hold only some rows of each.

A group of tensors is one file, or, of a run with sharded weights, a folder with a file per rank:

    optimizer.safetensors
    optimizer/shard-00001-of-00002.safetensors

The header of a shard says where its rows begin, as torch's distributed checkpoints in safetensors do: torch's
`HuggingFaceStorageReader` reads such a folder, too. They are written here because its writer holds a second copy of all
that it writes, gives no access to the bytes for hashing, and waits for other ranks so that signals are not handled.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from kedge.errors import DataError
from kedge.system.ranks.sharding import from_rows, in_parts, own_rows

__all__ = ["DTYPES", "ROWS", "StoredTensors", "part_for", "shard_name"]

ROWS = "DCP_SHARDING_INFO"
"""The key of a header's metadata under which torch's distributed checkpoints keep where each tensor's part begins."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The number formats that are stored, by their name in a safetensors file."""


def shard_name(group: str, number: int, count: int) -> str:
    """The file of one rank, from 0, of so many, relative to the checkpoint."""
    return f"{group}/shard-{number + 1:05d}-of-{count:05d}.safetensors"


@dataclass(frozen=True)
class _Piece:
    """Some rows of a tensor: the file, the tensor's name in it, the first row, and the shape."""

    path: Path
    name: str
    start: int
    shape: tuple[int, ...]


class StoredTensors(Mapping[str, Tensor]):
    """Tensors in files, by name; on the CPU, in memory of their own, so that the files may be deleted afterwards.

    Args:
        files: Files, and for each the names to read as, and in the file; None for all names, unchanged.

    Raises:
        DataError: Rows of a tensor are missing.
    """

    def __init__(self, files: Iterable[tuple[Path, Mapping[str, str] | None]]) -> None:
        self._opened: dict[Path, Any] = {}
        self._pieces: dict[str, list[_Piece]] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        for path, names in files:
            self._add(path, names)
        for name, pieces in self._pieces.items():
            pieces.sort(key=lambda piece: piece.start)
            if sum(math.prod(piece.shape) for piece in pieces) != math.prod(self.shape(name)):
                raise DataError(f"{pieces[0].path.parent}: rows of {name} are missing")

    def _add(self, path: Path, names: Mapping[str, str] | None) -> None:
        file = self._opened[path] = safe_open(path, framework="pt")
        begins = json.loads((file.metadata() or {}).get(ROWS, "{}"))
        present = list(file.keys())
        for name, saved in ({each: each for each in present} if names is None else names).items():
            if saved not in present:
                continue
            found = file.get_slice(saved)
            shape = tuple(found.get_shape())
            start = begins[saved]["saved_offsets"][0] if shape and saved in begins else 0
            self._pieces.setdefault(name, []).append(_Piece(path, saved, start, shape))
            self._dtypes[name] = DTYPES[found.get_dtype()]

    def __getitem__(self, name: str) -> Tensor:
        """The whole tensor."""
        shape = self.shape(name)
        if not shape:
            piece = self._pieces[name][0]
            return self._opened[piece.path].get_tensor(piece.name).clone()
        return self.rows(name, range(shape[0]))

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)

    def __contains__(self, name: object) -> bool:
        return name in self._pieces

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        last = self._pieces[name][-1]
        return (last.start + last.shape[0], *last.shape[1:]) if last.shape else ()

    def dtype(self, name: str) -> torch.dtype:
        """The tensor's number format."""
        return self._dtypes[name]

    def rows(self, name: str, rows: range) -> Tensor:
        """Some rows of a tensor of at least one axis; nothing else is read."""
        found = torch.empty((len(rows), *self.shape(name)[1:]), dtype=self._dtypes[name])
        for piece in self._pieces[name]:
            start, stop = max(rows.start, piece.start), min(rows.stop, piece.start + piece.shape[0])
            if start < stop:
                inside = self._opened[piece.path].get_slice(piece.name)[start - piece.start : stop - piece.start]
                found[start - rows.start : stop - rows.start] = inside
        return found


def part_for(tensors: Mapping[str, Tensor], name: str, own: Tensor) -> Tensor:
    """A tensor, or this rank's part of it if `own` is in parts; of stored ones only that part is read."""
    if isinstance(own, DTensor) and isinstance(tensors, StoredTensors):
        return from_rows(tensors.rows(name, own_rows(own)), own)
    return in_parts(tensors[name], own)
