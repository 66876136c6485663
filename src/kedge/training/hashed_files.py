"""Files whose bytes can be vouched for: hashed on their way to the disk, hashed again when they are read."""

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

__all__ = ["FileRecord", "read_tensors", "record_file", "tensor_pieces", "write_file"]

PIECE_BYTES, SMALL_BYTES = 4 * 2**20, 2**18
PIECES_IN_FLIGHT = 32
"""How far the hash may lag behind the disk. Copies from a GPU wait in memory for it: 256 MiB at most."""

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class FileRecord:
    """What a file is known by.

    Attributes:
        size: Its length, bytes.
        sha256: The hash of its bytes, in hexadecimal digits.
    """

    size: int
    sha256: str


def write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> FileRecord:
    """Write a new file, piece by piece, and return once the disk has it.

    A second thread hashes what the first one writes: either takes about as long as the other.

    Raises:
        OSError: The system refuses.
    """
    digest, size, pending = hashlib.sha256(), 0, deque[Future[None]]()
    with ThreadPoolExecutor(1) as hasher, path.open("xb") as file:
        for piece in _gathered(pieces):
            pending.append(hasher.submit(digest.update, piece))
            size += file.write(piece)
            if len(pending) > PIECES_IN_FLIGHT:
                pending.popleft().result()
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(size, digest.hexdigest())


def record_file(path: Path) -> FileRecord:
    """The record of a file as it lies on the disk.

    Raises:
        OSError: It cannot be read.
    """
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
            size += len(piece)
    return FileRecord(size, digest.hexdigest())


def tensor_pieces(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """A safetensors file of these tensors, in pieces: one tensor at a time leaves its device, and none is copied twice.

    The library's own writer gathers everything in memory first and gives nobody the bytes to hash. Tensors that share
    memory are each written in full.

    Raises:
        KeyError: A tensor's dtype is not one that training has.
    """
    # Wide numbers first: readers want each tensor to start at a multiple of its numbers' width.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header, end = {}, 0
    for name, tensor in ordered:
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, tensor in ordered:
        numbers = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        yield from (numbers[start : start + PIECE_BYTES] for start in range(0, len(numbers), PIECE_BYTES))


def _gathered(pieces: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """Small pieces joined: handing one to another thread takes as long as hashing 100 kB. Large ones as they are."""
    waiting, size = list[bytes | memoryview](), 0
    for piece in pieces:
        if len(piece) < SMALL_BYTES and size < PIECE_BYTES:
            waiting.append(piece)
            size += len(piece)
            continue
        if waiting:
            yield b"".join(waiting)
        yield piece
        waiting, size = [], 0
    if waiting:
        yield b"".join(waiting)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, on the CPU, in memory of their own: the file may be deleted."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118, it is no mapping
