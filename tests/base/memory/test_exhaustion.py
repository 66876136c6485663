"""Recognizing that memory ran out, by exceptions that the libraries themselves raise."""

from __future__ import annotations

import errno
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch

from kedge_base.errors import DataError
from kedge_base.machine.memory import Exhaustion, MemoryLimit, asked_for, in_phase, is_out_of_memory, release, with_unit

PIB = 2**50

CUDA = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.25 GiB is free."
)


def fail(do: Callable[[], object]) -> BaseException:
    with pytest.raises(Exception) as caught:  # noqa: PT011, the type is what is tested
        do()
    return caught.value


@pytest.mark.parametrize(
    ("do", "size"),
    [
        (lambda: torch.empty(PIB, dtype=torch.uint8), PIB),
        (lambda: np.empty(PIB, dtype=np.uint8), PIB),
        (lambda: bytes(2**62), None),
    ],
    ids=["torch", "numpy", "python"],
)
def test_what_the_libraries_raise_is_recognized(do: Callable[[], object], size: int | None) -> None:
    error = fail(do)
    assert is_out_of_memory(error)
    assert asked_for(error) == size


def test_a_gpu_that_is_full_is_recognized() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError(CUDA))
    assert asked_for(torch.OutOfMemoryError(CUDA)) == 2.5 * 2**30
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))


def test_causes_count_unless_kedge_has_said_what_is_wrong() -> None:
    def wrapped(kind: type[Exception]) -> BaseException:
        def do() -> None:
            try:
                bytes(2**62)
            except MemoryError as error:
                raise kind("no") from error

        return fail(do)

    assert is_out_of_memory(wrapped(ValueError))
    assert not is_out_of_memory(wrapped(DataError))
    assert is_out_of_memory(OSError(errno.ENOMEM, "Cannot allocate memory"))
    assert not is_out_of_memory(OSError(errno.ENOSPC, "No space left on device"))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(None)


def test_the_innermost_phase_is_noted() -> None:
    def do() -> None:
        with in_phase("the update"), in_phase("saving"):
            bytes(2**62)

    assert Exhaustion.of(fail(do), "loading").phase == "saving"
    assert Exhaustion.of(MemoryError(), "loading").phase == "loading"


def test_the_line_has_every_figure() -> None:
    full = Exhaustion("the update", 2**30, 3 * 2**30, MemoryLimit("ulimit -v", 4 * 2**30, 7 * 2**29))
    assert str(full) == (
        "out of memory during the update: 1.0 GiB more were asked for, the process holds 3.0 GiB, and 3.5 GiB of "
        "4.0 GiB that ulimit -v allows are in use"
    )
    assert str(Exhaustion("saving", None, 2**20, None)) == "out of memory during saving: the process holds 1.0 MiB"


def test_what_a_failed_function_held_is_freed() -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    def inner() -> None:
        tensor = torch.zeros(8)
        held.append(weakref.ref(tensor))
        raise MemoryError

    def outer() -> None:
        tensor = torch.zeros(8)
        held.append(weakref.ref(tensor))
        try:
            inner()
        except MemoryError as error:
            raise ValueError("another") from error

    try:
        outer()
    except ValueError as error:
        assert all(each() is not None for each in held)
        release(error)
        assert all(each() is None for each in held)


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 bytes"), (2**10, "1.0 KiB"), (310 * 2**20, "310 MiB"), (1.5 * 2**30, "1.5 GiB")]
)
def test_sizes_in_words(size: float, text: str) -> None:
    assert with_unit(size) == text
