"""Rows that cannot be used: counted, written down with their reason, and too many of them stop the run."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from kedge.data.rows import Row
from kedge.errors import DataError
from kedge.output import writing

__all__ = ["MAX_REJECTED_FRACTION", "Rejection", "RowError", "Table", "check_rejections", "write_rejections"]

MAX_REJECTED_FRACTION = 0.05

RecordT = TypeVar("RecordT")


class RowError(ValueError):
    """Why one row cannot be used; the reader turns it into a `Rejection`."""


@dataclass(frozen=True)
class Rejection:
    """A row that was left out.

    Attributes:
        source: the file, data set or list it stands in.
        line: its line or row, counted from 1.
        reason: what is wrong with it.
        preview: its beginning, safe to print.
    """

    source: str
    line: int
    reason: str
    preview: str = ""

    @classmethod
    def of(cls, row: Row, reason: str) -> Rejection:
        """The rejection of a row."""
        return cls(row.source, row.line, reason, row.preview)


@dataclass(frozen=True)
class Table(Generic[RecordT]):
    """What a source held.

    Attributes:
        records: the usable rows, in order.
        rejected: the others.
    """

    records: list[RecordT]
    rejected: list[Rejection]


def write_rejections(path: Path, rejections: Sequence[Rejection]) -> None:
    """Append rejections to a JSON-lines file: `file`, `line`, `reason`, `preview`. Without any, nothing is written.

    Raises:
        OutputError: The file, or its folder, cannot be written.
    """
    if not rejections:
        return
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as stream:
            for entry in rejections:
                row = {"file": entry.source, "line": entry.line, "reason": entry.reason, "preview": entry.preview}
                stream.write(json.dumps(row) + "\n")


def check_rejections(
    table: Table[RecordT], *, name: str = "the data", max_rejected_fraction: float = MAX_REJECTED_FRACTION
) -> None:
    """Stop before any training where too much of a source is unusable.

    Args:
        table: what was read.
        name: what it was read from, for the message.
        max_rejected_fraction: the share of rejected rows that is still tolerated, 0 to 1.

    Raises:
        DataError: Nothing is usable, or more than the tolerated share is not.
    """
    rejected, total = len(table.rejected), len(table.records) + len(table.rejected)
    if total == 0:
        raise DataError(f"{name} holds no rows")
    if table.records and rejected <= max_rejected_fraction * total:
        return
    reason, count, first = _commonest_reason(table.rejected)
    tolerated = f", at most {max_rejected_fraction:.1%} may" if table.records else ""
    raise DataError(
        f"{rejected} of {total} rows ({rejected / total:.1%}) cannot be used{tolerated}: "
        f"{count} times {reason!r}, first at {first.source}:{first.line}"
    )


def _commonest_reason(rejections: Sequence[Rejection]) -> tuple[str, int, Rejection]:
    # Reasons that differ only in their numbers (columns, token counts) are one reason.
    kinds = [re.sub(r"\d+", "0", rejection.reason) for rejection in rejections]
    [(kind, count)] = Counter(kinds).most_common(1)
    first = rejections[kinds.index(kind)]
    return first.reason, count, first
