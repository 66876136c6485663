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
from dataclasses import dataclass
from typing import Any

from kedge.errors import KedgeError, OutOfMemoryError
from kedge.system.memory.limits import MemoryLimit, held_memory, tightest_limit

__all__ = ["Exhaustion", "asked_for", "in_phase", "is_out_of_memory", "release", "with_unit"]

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

NOTE = "_kedge_exhaustion"
"""The attribute of an exception with its `Exhaustion`."""


@dataclass(frozen=True)
class Exhaustion:
    """What was known when memory ran out.

    Attributes:
        phase: What was being done, as it stands in `out of memory during PHASE`.
        asked: Bytes whose allocation failed; None if the exception does not say.
        held: Bytes that the process held, on the device whose memory ran out.
        limit: The limit that was reached; None if it is not known.
    """

    phase: str
    asked: int | None
    held: int
    limit: MemoryLimit | None

    @classmethod
    def of(cls, error: BaseException, phase: str) -> Exhaustion:
        """The figures that `in_phase` noted; without them, those of now."""
        noted = getattr(error, NOTE, None)
        if noted is not None:
            return noted
        gpu = _gpu() if "CUDA" in str(error) or "CUBLAS" in str(error) else None
        held, limit = gpu or (held_memory(), tightest_limit())
        return cls(phase, asked_for(error), held, limit)

    def __str__(self) -> str:
        asked = f"{with_unit(self.asked)} more were asked for, " if self.asked else ""
        line = f"out of memory during {self.phase}: {asked}the process holds {with_unit(self.held)}"
        if self.limit is None:
            return line
        used = f"{with_unit(self.limit.used)} of {with_unit(self.limit.limit)}"
        return f"{line}, and {used} that {self.limit.name} allows are in use"


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
    """If memory runs out in the block, note phase and figures in the exception; the innermost phase counts.

    Args:
        name: See `Exhaustion`.
    """
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error) and not isinstance(error, KedgeError):
            with suppress(AttributeError):  # an exception without attributes of its own
                setattr(error, NOTE, Exhaustion.of(error, name))
        raise


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
    if (cuda := _cuda()) is not None:
        cuda.empty_cache()
    if sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def with_unit(size: float) -> str:
    """Bytes as `1.5 GiB`, `310 MiB` or `12 KiB`."""
    for unit in "TGMK":
        if size >= UNITS[unit]:
            number = size / UNITS[unit]
            return f"{number:.{1 if number < 10 else 0}f} {unit}iB"
    return f"{size:.0f} bytes"


def _cuda() -> Any:
    """`torch.cuda` if this process uses a GPU, else None."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda if cuda is not None and cuda.is_initialized() else None


def _gpu() -> tuple[int, MemoryLimit] | None:
    """What the process holds of the current GPU, and the GPU's memory."""
    if (cuda := _cuda()) is None:
        return None
    free, total = cuda.mem_get_info()
    return cuda.memory_reserved(), MemoryLimit(f"cuda:{cuda.current_device()}", total, total - free)
