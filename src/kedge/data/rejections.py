"""Unusable rows: counted and written to a file with their reason; too many of them stop the run."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from kedge.data.rows import Row
from kedge.errors import DataError
from kedge.system.output import writing

__all__ = [
    "MAX_REJECTED_FRACTION",
    "Rejection",
    "RowError",
    "Table",
    "check_rejections",
    "write_rejections",
]

MAX_REJECTED_FRACTION = 0.05

RecordT = TypeVar("RecordT")


class RowError(ValueError):
    """The reason why a row cannot be used; the reader turns it into a `Rejection`.

    Args:
        reason: What is wrong with this row.
        kind: The reason without what differs between rows, under which rows are counted; by default what precedes the
            first detail of `reason`, without numbers.
    """

    def __init__(self, reason: str, kind: str = "") -> None:
        super().__init__(reason)
        self.kind = kind or _kind_of(reason)


@dataclass(frozen=True)
class Rejection:
    """An unusable row.

    Attributes:
        source: the file, data set or list that holds it.
        line: its line or row number, counted from 1.
        reason: what is wrong with it.
        preview: its first characters, safe to print.
        kind: the reason without what differs between rows; rows are counted by it.
    """

    source: str
    line: int
    reason: str
    preview: str = ""
    kind: str = ""

    @classmethod
    def of(cls, row: Row, error: RowError) -> Rejection:
        """The rejection of a row."""
        return cls(row.source, row.line, str(error), row.preview, error.kind)


@dataclass(frozen=True)
class Table(Generic[RecordT]):
    """The content of a source.

    Attributes:
        records: the usable rows, in order.
        rejected: the unusable rows.
        num_cut: usable rows of which a part was cut to fit.
        origins: index of each usable row's source among the names in `Sources`; 0 for any other source.
    """

    records: list[RecordT]
    rejected: list[Rejection]
    num_cut: int = 0
    origins: list[int] = field(default_factory=list[int])

    def dropped(self) -> dict[str, int]:
        """Number of unusable rows by reason, most frequent first."""
        return dict(Counter(rejection.kind or rejection.reason for rejection in self.rejected).most_common())


def write_rejections(path: Path, rejections: Sequence[Rejection]) -> None:
    """Append rejections to a JSON-lines file: `file`, `line`, `reason`, `preview`. An empty list writes nothing.

    Raises:
        OutputError: The file or its folder cannot be written.
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
    """Raise before any training if too many rows of a source are unusable.

    Args:
        table: the rows that were read.
        name: name of the source, for the message.
        max_rejected_fraction: the largest accepted share of unusable rows, 0 to 1.

    Raises:
        DataError: No row is usable, or too many are not.
    """
    rejected, total = len(table.rejected), len(table.records) + len(table.rejected)
    if total == 0:
        raise DataError(f"{name} has no rows")
    if table.records and rejected <= max_rejected_fraction * total:
        return
    reason, count, first = _commonest_reason(table.rejected)
    allowed = f"data.max_rejected_fraction={max_rejected_fraction:g}"
    limit = f", {allowed} allows {max_rejected_fraction:.1%}" if table.records else ""
    raise DataError(
        f"{rejected} of {total} rows ({rejected / total:.1%}) cannot be used{limit}; "
        f"most common reason, {count} times: {reason!r}, first at {first.source}:{first.line}{_hint(first.kind)}"
    )


def _hint(kind: str) -> str:
    """Which setting may make the rows of the most common reason usable."""
    if missing := re.fullmatch(r"field '(?!role'|content'|from'|value')(\w+)' is missing", kind):
        return f"; data.columns.{missing[1]}=… names a column that holds it"
    if limit := re.search(r"(.*) longer than (max_\w+)=\d+$", kind):
        cut = {"answer alone": "; data.truncate cuts answers of comparisons", "text": ""}.get(
            limit[1], "; data.truncate cuts prompts"
        )
        return f"; the limit is data.{limit[2]}, or the model's context{cut}"
    return ""


def _commonest_reason(rejections: Sequence[Rejection]) -> tuple[str, int, Rejection]:
    kinds = [rejection.kind for rejection in rejections]
    [(kind, count)] = Counter(kinds).most_common(1)
    first = rejections[kinds.index(kind)]
    return first.reason, count, first


def _kind_of(reason: str) -> str:
    """`field 'x' is missing (the row has 'y')` → `field 'x' is missing`; `3 responses …` → `N responses …`."""
    return re.sub(r"\d[\d,]*", "N", re.split(r": | \(|, expected ", reason, maxsplit=1)[0])
