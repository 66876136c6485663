"""Files whose bytes can be vouched for: hashed on their way to the disk, hashed again when they are read."""

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from io import BufferedWriter
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

__all__ = ["FileRecord", "read_tensors", "record_file", "tensor_pieces", "write_file", "write_files"]

PIECE_BYTES, SMALL_BYTES = 4 * 2**20, 2**17
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


def write_files(folder: Path, contents: Mapping[str, Iterable[bytes | memoryview]]) -> dict[str, FileRecord]:
    """Write new files, piece by piece, and return once the disk has all of them.

    A second thread hashes what the first one writes: either takes about as long as the other. The disk is asked for
    each file when all are written, which it takes together in hardly more time than one.

    Args:
        folder: Where they are to lie.
        contents: Their bytes, by name.

    Returns:
        Their records, by name.

    Raises:
        OSError: The system refuses.
    """
    files: dict[str, BufferedWriter] = {}
    with ThreadPoolExecutor(1) as thread, ExitStack() as opened:
        hashing = {name: _Hashing(thread) for name in contents}
        for name, pieces in contents.items():
            files[name] = opened.enter_context((folder / name).open("xb"))
            for piece in _gathered(pieces):
                hashing[name].add(piece)
                files[name].write(piece)
            files[name].flush()
        for file in files.values():
            os.fsync(file.fileno())
        return {name: each.record() for name, each in hashing.items()}


def write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> FileRecord:
    """Write one new file; see `write_files`."""
    return write_files(path.parent, {path.name: pieces})[path.name]


class _Hashing:
    """The hash of a file, made by a thread that takes one piece after the other."""

    def __init__(self, thread: ThreadPoolExecutor) -> None:
        self._thread, self._digest, self._size = thread, hashlib.sha256(), 0
        self._pending = deque[Future[None]]()

    def add(self, piece: bytes | memoryview) -> None:
        """Hash the next piece, sooner or later."""
        self._size += len(piece)
        self._pending.append(self._thread.submit(self._digest.update, piece))
        if len(self._pending) > PIECES_IN_FLIGHT:
            self._pending.popleft().result()

    def record(self) -> FileRecord:
        """What the file is known by, once all of it is hashed."""
        for future in self._pending:
            future.result()
        return FileRecord(self._size, self._digest.hexdigest())


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
