"""Memory limits of the process, and the handling of failed allocations. Imports no torch.

On Linux, limits are `ulimit`, the control group and the machine; elsewhere they are unknown. When memory runs out, this
module recognizes the exception, reads the size of the failed allocation, and frees tensors that the exception holds.

Source: setrlimit(2), proc(5); the kernel's cgroup-v2.rst and cgroup-v1/memory.rst.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import platform
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kedge_base.errors import KedgeError, OutOfMemoryError
from kedge_base.machine.control_groups import group_folders

MEMORY_INFO = Path("/proc/meminfo")
OWN_PAGES = Path("/proc/self/statm")

TOTAL = 0
RESIDENT = 1
PRIVATE = 5
"""Fields of /proc/self/statm, in pages: address space, resident, private data and stack."""

GROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Files with a group's limit and usage, and the entry of `memory.stat` that the kernel frees first, in versions 2 and
1.
"""

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
"""Texts that identify out-of-memory errors raised as a plain RuntimeError or a library's own class."""

ASKED = re.compile(r"(?:tried|Unable) to allocate ([\d.]+) ?([KMGTP]?)i?(?:B|bytes)\b", re.IGNORECASE)
"""The size of an allocation in the errors of torch, on a CPU and on GPUs, and of numpy."""

NOTE = "_kedge_exhaustion"
"""The attribute of an exception that holds its `Exhaustion`."""


@dataclass(frozen=True)
class MemoryLimit:
    """A limit on the memory of this process.

    Attributes:
        name: Source of the limit: `ulimit -v`, `ulimit -d`, `the control group` or `the machine`.
        limit: Bytes.
        used: Bytes that already count toward it, including other processes in a control group or machine.
    """

    name: str
    limit: int
    used: int

    @property
    def free(self) -> int:
        """Bytes left until the limit."""
        return max(self.limit - self.used, 0)


def memory_limits() -> list[MemoryLimit]:
    """All limits; none on systems other than Linux."""
    if sys.platform != "linux":
        return []
    return [*_own_limits(), *_group_limits(), _machine()]


def tightest_limit() -> MemoryLimit | None:
    """The limit that leaves the least memory free; None where no limit is known."""
    return min(memory_limits(), key=lambda each: each.free, default=None)


def free_memory() -> int:
    """Bytes that the process can still allocate, given its own limits, its container and the machine."""
    return min((each.free for each in memory_limits()), default=sys.maxsize)


def held_memory() -> int:
    """Resident memory of the process, bytes; 0 on systems other than Linux."""
    return _own_pages(RESIDENT)


def private_memory() -> int:
    """Private memory of the process in bytes, as `memory_limit` counts it; 0 on systems other than Linux."""
    return _own_pages(PRIVATE)


@contextmanager
def memory_limit(most: int) -> Iterator[None]:
    """Limit the process's private memory inside the block; allocations beyond it raise MemoryError.

    Linux only, and for all threads of the process; on other systems nothing is limited.

    Args:
        most: Bytes, including what the process already holds.
    """
    if sys.platform != "linux":
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    lower = most if soft == resource.RLIM_INFINITY else min(most, soft)
    resource.setrlimit(resource.RLIMIT_DATA, (lower, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _own_pages(field: int) -> int:
    if sys.platform != "linux":
        return 0
    return int(OWN_PAGES.read_text(encoding="ascii").split()[field]) * os.sysconf("SC_PAGE_SIZE")


def _own_limits() -> Iterator[MemoryLimit]:
    if sys.platform != "linux":
        return
    import resource

    kinds = (("ulimit -v", resource.RLIMIT_AS, TOTAL), ("ulimit -d", resource.RLIMIT_DATA, PRIVATE))
    for name, kind, field in kinds:
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY:
            yield MemoryLimit(name, soft, _own_pages(field))


def _group_limits() -> Iterator[MemoryLimit]:
    """The limits of the process's control group and its parents."""
    for folder in group_folders("memory"):
        for limit_file, use_file, freed_first in GROUP_FILES:
            limit = _number(folder / limit_file)
            used = _number(folder / use_file)
            if limit is not None and used is not None:
                yield MemoryLimit("the control group", limit, max(used - _stat(folder, freed_first), 0))


def _number(path: Path) -> int | None:
    """The number in a file; None without one, such as for `max`. Version 1 writes nearly 2⁶³ for no limit."""
    with suppress(OSError, ValueError):
        return int(path.read_text(encoding="ascii"))
    return None


def _stat(folder: Path, name: str) -> int:
    """A figure of a control group's `memory.stat`; 0 if it is missing."""
    with suppress(OSError, ValueError):
        lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
        return next((int(line.split()[1]) for line in lines if line.split()[0] == name), 0)
    return 0


def _machine() -> MemoryLimit:
    sizes = {
        line.split(":")[0]: int(line.split()[1]) * 1024 for line in MEMORY_INFO.read_text(encoding="ascii").splitlines()
    }
    return MemoryLimit("the machine", sizes["MemTotal"], sizes["MemTotal"] - sizes["MemAvailable"])


@dataclass(frozen=True)
class Exhaustion:
    """State of the memory when it ran out.

    Attributes:
        phase: The work under way, as in `out of memory during PHASE`.
        asked: Bytes of the failed allocation; None if the exception does not give them.
        held: Bytes that the process held on the device that ran out of memory.
        limit: The limit that was reached; None if unknown.
    """

    phase: str
    asked: int | None
    held: int
    limit: MemoryLimit | None

    @classmethod
    def of(cls, error: BaseException, phase: str) -> Exhaustion:
        """Return the figures that `in_phase` noted, or else the current ones."""
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
    """True if an exception, or the one that it was raised from, says that memory ran out.

    kedge's own errors do not count, because they already say what is wrong, such as a file that is too large.
    """
    while error is not None and not (isinstance(error, KedgeError) and not isinstance(error, OutOfMemoryError)):
        # Compared by name, because importing torch's class would import torch.
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
            return True
        if isinstance(error, OSError) and error.errno == errno.ENOMEM:
            return True
        if isinstance(error, Exception) and any(text in str(error) for text in TEXTS):
            return True
        error = error.__cause__
    return False


def asked_for(error: BaseException | None) -> int | None:
    """Return the bytes of the failed allocation; None if the exception does not say."""
    while error is not None:
        if found := ASKED.search(str(error)):
            return round(float(found[1]) * UNITS[found[2].upper()])
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
        note_exhaustion(error, name)
        raise


def note_exhaustion(error: Exception, phase: str) -> None:
    """Note phase and figures in an exception, if it says that memory ran out; see `in_phase`."""
    if is_out_of_memory(error) and not isinstance(error, KedgeError):
        with suppress(AttributeError):  # an exception that has no `__dict__`
            setattr(error, NOTE, Exhaustion.of(error, phase))


def release(error: BaseException | None) -> None:
    """Free memory that a failed computation still holds: the local variables of the functions that the exception passed
    through.

    Its traceback keeps them alive, and with them every activation. Freed memory is then returned to the system, so that
    other threads and libraries can use it.
    """
    while error is not None:
        if error.__traceback__ is not None:
            traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    gc.collect()
    if (cuda := _cuda()) is not None:
        cuda.empty_cache()
    give_back()


def give_back() -> None:
    """Return freed CPU memory to the system; the next allocations cost page faults."""
    if sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def with_unit(size: float) -> str:
    """Format bytes as `1.5 GiB`, `310 MiB` or `12 KiB`."""
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
    """Bytes that the process holds on the current GPU, and the GPU's memory."""
    if (cuda := _cuda()) is None:
        return None
    free, total = cuda.mem_get_info()
    return cuda.memory_reserved(), MemoryLimit(f"cuda:{cuda.current_device()}", total, total - free)
