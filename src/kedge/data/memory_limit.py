"""An end to what a stranger's file or program may take of this machine's memory."""

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
"""Of the memory that is free, what one source may take: the machine stays alive."""

AT_ONCE = 8
"""Rows that are made under one limit: setting it takes longer than making a row."""

MEMORY_INFO, OWN_PAGES = Path("/proc/meminfo"), Path("/proc/self/statm")
GROUP_LIMIT, GROUP_USE = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")


@contextmanager
def memory_limit(most: int) -> Iterator[None]:
    """Inside, the process has at most so much memory of its own; what would take more raises a MemoryError.

    Linux alone keeps this limit, for all threads of the process; elsewhere nothing is limited.

    Args:
        most: Bytes, together with what the process holds already.
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
    """Bytes of its own that the process holds, as the limit counts them; 0 where there is no limit."""
    if sys.platform != "linux":
        return 0
    return int(OWN_PAGES.read_text().split()[5]) * os.sysconf("SC_PAGE_SIZE")


def free_memory() -> int:
    """Bytes that the process can still take: of the machine's, and of those that its container allows it."""
    if sys.platform != "linux":
        return sys.maxsize
    [available] = (line for line in MEMORY_INFO.read_text().splitlines() if line.startswith("MemAvailable"))
    free = int(available.split()[1]) * 1024
    if GROUP_LIMIT.is_file() and (limit := GROUP_LIMIT.read_text().strip()) != "max":
        free = min(free, int(limit) - int(GROUP_USE.read_text()))
    return max(free, 0)


def within_free_memory(rows: Iterable[T], name: str) -> Iterator[T]:
    """The rows of a source, as long as there is memory for them and for what is made of them.

    A small file may hold more than any machine: compressed, or one long text that a million rows refer to.

    Args:
        rows: Made one by one, by code that may be asked for too much.
        name: The source, as the user named it.

    Raises:
        DataError: There is no more memory.
    """
    free = int(SHARE * free_memory())
    most, iterator, count = own_memory() + free, iter(rows), 0
    while True:
        try:
            with memory_limit(most):
                few = list(islice(iterator, AT_ONCE))
        except MemoryError as error:
            room = f"the {free / GIB:.2f} GiB of memory that are free"
            raise DataError(f"{name}: what comes after row {count:,} takes more than {room}") from error
        if not few:
            return
        count += len(few)
        yield from few
