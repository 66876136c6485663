"""Memory that runs out: which exceptions say so, how much was asked for, and giving back what the failure holds."""

from __future__ import annotations

import ctypes
import errno
import gc
import platform
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from kedge.errors import KedgeError, OutOfMemoryError

__all__ = ["asked_for", "in_phase", "is_out_of_memory", "phase_of", "release", "with_unit"]

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "P": 2**50}

TEXTS = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",  # Windows
    "MPS backend out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "std::bad_alloc",
    "os error 12",  # ENOMEM, from safetensors and tokenizers
    "Cannot allocate memory",
)
"""Texts of exceptions that are a plain RuntimeError, or of a library's own class."""

ASKED = re.compile(
    r"tried to allocate (?P<size>[\d.]+) ?(?P<unit>[KMGTP]?)i?(?:B|bytes)\b"  # torch, on a CPU and on GPUs
    r"|Unable to allocate (?P<size_np>[\d.]+) ?(?P<unit_np>[KMGTP]?)i?(?:B|bytes)\b",  # numpy
    re.IGNORECASE,
)

PHASE = "_kedge_phase"
"""The attribute of an exception that says in which phase memory ran out."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an exception, or the one that it was raised from, says that memory ran out.

    An error of kedge's own has said already what is wrong, such as a file that is too large.
    """
    while error is not None and not (isinstance(error, KedgeError) and not isinstance(error, OutOfMemoryError)):
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's, which is not loaded
            return True
        if isinstance(error, OSError) and error.errno == errno.ENOMEM:
            return True
        if isinstance(error, Exception) and any(text in str(error) for text in TEXTS):
            return True
        error = error.__cause__
    return False


def asked_for(error: BaseException | None) -> int | None:
    """The bytes whose allocation failed; None if the exception does not say."""
    while error is not None:
        if found := ASKED.search(str(error)):
            size, unit = (found[name] or found[f"{name}_np"] for name in ("size", "unit"))
            return round(float(size) * UNITS[(unit or "").upper()])
        error = error.__cause__
    return None


@contextmanager
def in_phase(name: str) -> Iterator[None]:
    """If memory runs out in the block, note the phase in the exception; the innermost one counts.

    Args:
        name: As it stands in `out of memory during NAME`.
    """
    try:
        yield
    except Exception as error:
        if phase_of(error) is None and is_out_of_memory(error):
            with suppress(AttributeError):
                setattr(error, PHASE, name)
        raise


def phase_of(error: BaseException) -> str | None:
    """The phase that `in_phase` noted, if any."""
    return getattr(error, PHASE, None)


def release(error: BaseException | None) -> None:
    """Free what a failed computation still holds: the local variables of the functions that the exception left.

    The exception keeps them alive by its traceback, and with them every activation. What is freed then goes back to the
    system, so that other threads and libraries can have it, too.
    """
    while error is not None:
        if error.__traceback__ is not None:
            traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    gc.collect()
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.empty_cache()
    if sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def with_unit(size: float) -> str:
    """Bytes as `1.5 GiB`, `310 MiB` or `12 KiB`."""
    for unit in "TGMK":
        if size >= UNITS[unit]:
            number = size / UNITS[unit]
            return f"{number:.{1 if number < 10 else 0}f} {unit}iB"
    return f"{size:.0f} bytes"
