"""How much memory this process may use: `ulimit`, its control group, the machine. Linux; elsewhere nothing is known.

Source: setrlimit(2), proc(5); the kernel's cgroup-v2.rst and cgroup-v1/memory.rst.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "MemoryLimit",
    "free_memory",
    "held_memory",
    "memory_limit",
    "memory_limits",
    "private_memory",
    "tightest_limit",
]

MEMORY_INFO, OWN_PAGES, OWN_GROUPS = Path("/proc/meminfo"), Path("/proc/self/statm"), Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")

TOTAL, RESIDENT, PRIVATE = 0, 1, 5
"""Fields of /proc/self/statm, in pages: address space, resident, private data and stack."""

GROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Limit, use, and what the kernel frees first of the use, in `memory.stat`; for versions 2 and 1."""


@dataclass(frozen=True)
class MemoryLimit:
    """A limit on the memory of this process.

    Attributes:
        name: What sets it: `ulimit -v`, `ulimit -d`, `the control group` or `the machine`.
        limit: Bytes.
        used: Bytes that count toward it already; a control group and a machine have other processes, too.
    """

    name: str
    limit: int
    used: int

    @property
    def free(self) -> int:
        """Bytes until the limit."""
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
    tightest = tightest_limit()
    return sys.maxsize if tightest is None else tightest.free


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
    return int(OWN_PAGES.read_text().split()[field]) * os.sysconf("SC_PAGE_SIZE")


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
    """The limits of the process's control group and of those around it, as far as they can be seen from here."""
    for folder in _group_folders():
        for limit_file, use_file, freed_first in GROUP_FILES:
            limit, used = _number(folder / limit_file), _number(folder / use_file)
            if limit is not None and used is not None:
                yield MemoryLimit("the control group", limit, max(used - _stat(folder, freed_first), 0))


def _group_folders() -> list[Path]:
    """The folders of the memory controller for this process, innermost first.

    Lines of /proc/self/cgroup: `0::/path` in version 2, `4:memory:/path` in version 1. Inside a container the path is
    often one of the host, and the container's own group lies at the root of the mount.
    """
    try:
        lines = OWN_GROUPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    folders: dict[Path, None] = {}
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" or "memory" in controllers.split(","):
            root = GROUPS if number == "0" else GROUPS / "memory"
            own = root / path.lstrip("/")
            inside = [each for each in (own, *own.parents) if each == root or root in each.parents]
            folders |= dict.fromkeys(inside)
    return list(folders)


def _number(path: Path) -> int | None:
    """The number in a file; None without one, such as for `max`. Version 1 writes nearly 2⁶³ for no limit."""
    try:
        number = int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return number if number < 2**62 else None


def _stat(folder: Path, name: str) -> int:
    """A figure of a control group's `memory.stat`; 0 if there is none."""
    try:
        lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[0] == name), 0)


def _machine() -> MemoryLimit:
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in MEMORY_INFO.read_text().splitlines()}
    return MemoryLimit("the machine", sizes["MemTotal"], sizes["MemTotal"] - sizes["MemAvailable"])
