"""Written files are valid safetensors, bit for bit, with correct hashes."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from kedge.ranks.sharding import StoredTensors
from kedge.training.checkpoint.files import (
    DTYPE_NAMES,
    PIECE_BYTES,
    FileRecord,
    record_file,
    tensor_pieces,
    write_files,
)


def write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> FileRecord:
    return write_files(path.parent, {path.name: pieces})[path.name]


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    return dict(StoredTensors([(path, None)]))


def random_bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Random bits: all kinds of NaN, denormals, both zeros."""
    generator = torch.Generator().manual_seed(seed)
    width = torch.empty((), dtype=dtype).element_size()
    size = int(torch.Size(shape).numel())
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    numbers = torch.randint(0, 256, (size * width,), generator=generator).to(torch.uint8)
    return numbers.view(dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    return tensor.dtype, tensor.shape, tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@given(st.dictionaries(st.text(min_size=1, max_size=8), st.tuples(st.sampled_from(list(DTYPE_NAMES)), SHAPES)))
def test_every_bit_comes_back(tmp_path_factory, wanted):
    tensors = {name: random_bits(dtype, shape, seed) for seed, (name, (dtype, shape)) in enumerate(wanted.items())}
    tensors.pop("__metadata__", None)
    path = tmp_path_factory.mktemp("bits") / "some.safetensors"
    write_file(path, tensor_pieces(tensors))
    expected = {name: bits(tensor) for name, tensor in tensors.items()}
    assert {name: bits(tensor) for name, tensor in read_tensors(path).items()} == expected
    assert {name: bits(tensor) for name, tensor in load_file(path).items()} == expected


def test_a_transposed_and_a_shared_tensor_are_written_in_full(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    tensors = {"base": base, "turned": base.T, "row": base[1], "graph": base.clone().requires_grad_() * 2}
    write_file(tmp_path / "file", tensor_pieces(tensors))
    read = read_tensors(tmp_path / "file")
    for name, tensor in tensors.items():
        torch.testing.assert_close(read[name], tensor.detach(), rtol=0, atol=0)


def test_the_record_is_of_the_file_whatever_its_pieces(tmp_path):
    contents = bytes(range(256)) * (PIECE_BYTES // 256) + b"the rest"
    cuts = [0, 5, 300_005, 300_010, 300_010, 700_000, *range(700_010, len(contents), 100_000), len(contents)]
    record = write_file(tmp_path / "file", [contents[start:end] for start, end in itertools.pairwise(cuts)])
    assert (tmp_path / "file").read_bytes() == contents
    assert record == FileRecord(len(contents), hashlib.sha256(contents).hexdigest())
    assert record_file(tmp_path / "file") == record


def test_files_are_never_overwritten(tmp_path):
    write_file(tmp_path / "file", [b"first"])
    with pytest.raises(FileExistsError):
        write_file(tmp_path / "file", [b"second"])
    assert (tmp_path / "file").read_bytes() == b"first"


def test_loaded_tensors_outlive_their_file(tmp_path):
    write_file(tmp_path / "file", tensor_pieces({"weight": torch.ones(1000)}))
    read = read_tensors(tmp_path / "file")["weight"]
    (tmp_path / "file").write_bytes(b"")
    assert float(read.sum()) == 1000
