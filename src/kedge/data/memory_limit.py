"""Memory limits for untrusted files, so that they cannot exhaust the machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

from kedge.errors import DataError
from kedge.system.memory import free_memory, memory_limit, private_memory

__all__ = ["within_free_memory"]

T = TypeVar("T")

GIB = 2**30
SHARE = 0.9
"""Share of the free memory that one source may use, so that the machine keeps running."""

AT_ONCE = 8
"""Rows read per limit: setting the limit takes longer than reading a row."""


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
    most, iterator, count = private_memory() + free, iter(rows), 0
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
