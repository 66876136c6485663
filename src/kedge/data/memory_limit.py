"""Memory limits for untrusted files and templates, so that they cannot exhaust the machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TypeVar

from kedge.errors import DataError

__all__ = ["free_memory", "memory_limit", "own_memory", "within_free_memory"]

T = TypeVar("T")

GIB = 2**30
SHARE = 0.9
"""Share of the free memory that one source may use, so that the machine keeps running."""

AT_ONCE = 8
"""Rows read per limit: setting the limit takes longer than reading a row."""

MEMORY_INFO, OWN_PAGES = Path("/proc/meminfo"), Path("/proc/self/statm")
GROUP_LIMIT, GROUP_USE = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")


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


def own_memory() -> int:
    """Private memory of the process in bytes, as `memory_limit` counts it; 0 on systems without the limit."""
    if sys.platform != "linux":
        return 0
    return int(OWN_PAGES.read_text().split()[5]) * os.sysconf("SC_PAGE_SIZE")


def free_memory() -> int:
    """Bytes that the process can still allocate, given the machine and its container."""
    if sys.platform != "linux":
        return sys.maxsize
    [available] = (line for line in MEMORY_INFO.read_text().splitlines() if line.startswith("MemAvailable"))
    free = int(available.split()[1]) * 1024
    if GROUP_LIMIT.is_file() and (limit := GROUP_LIMIT.read_text().strip()) != "max":
        free = min(free, int(limit) - int(GROUP_USE.read_text()))
    return max(free, 0)


def within_free_memory(rows: Iterable[T], name: str) -> Iterator[T]:
    """Yield the rows of a source as long as they, and the records made from them, fit into the free memory.

    A small file may expand to more than any machine holds: compression, or a million references to one long text.

    Args:
        rows: Rows, produced lazily.
        name: The source, as the user named it.

    Raises:
        DataError: The next rows do not fit.
    """
    free = int(SHARE * free_memory())
    most, iterator, count = own_memory() + free, iter(rows), 0
    while True:
        try:
            with memory_limit(most):
                few = list(islice(iterator, AT_ONCE))
        except MemoryError as error:
            room = f"the {free / GIB:.2f} GiB of free memory"
            raise DataError(f"{name}: reading past row {count:,} needs more than {room}") from error
        if not few:
            return
        count += len(few)
        yield from few
