"""Reads sources into records and accounts for every row that cannot be used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from kedge.data.fields import MAY_BE_EMPTY, Role, column_in, columns_of, name_missing_columns
from kedge.data.parsing import ReadingOptions, parse_comparison, parse_demonstration, parse_prompt
from kedge.data.records import Prompt, Rejection, RowError, Table, hint_of, write_rejections
from kedge.data.sources import Source, Sources, numbered_rows
from kedge_base.errors import DataError
from kedge_base.texts import counted

_PARSERS: dict[str, Callable[[object, ReadingOptions], Any]] = {
    "demonstrations": parse_demonstration,
    "pretraining": parse_demonstration,
    "comparisons": parse_comparison,
    "prompts": parse_prompt,
}


def read_rows(
    source: Source,
    role: Role,
    *,
    max_rejected_fraction: float = 0.0,
    rejected_to: Path | None = None,
    **settings: Any,
) -> Table[Any]:
    """Read rows into records, unless too many are unusable.

    Args:
        source: files, folders, hub ids or rows: see `rows_of`.
        role: the role of the rows; its parser, such as `parse_prompt`, documents the forms of a row.
        max_rejected_fraction: share of unusable rows above which reading fails, 0 to 1.
        rejected_to: the `rejected.jsonl` that unusable rows are appended to, even if reading then fails.
        settings: the fields of `ReadingOptions`.

    Raises:
        DataError: As in `read_table`; no row is usable, or too many are unusable.

    Source: spec §2.
    """
    table = read_table(source, role, ReadingOptions(**settings))
    if rejected_to is not None:
        write_rejections(rejected_to, table.rejected)
    named = ", ".join(source.names) if isinstance(source, Sources) else source
    _check_rejections(table, str(named) if isinstance(named, (str, Path)) else "the data", max_rejected_fraction)
    return table


def _check_rejections(table: Table[Any], name: str, max_rejected_fraction: float) -> None:
    """Raise `DataError` before any training if no row of a source is usable, or too many are not."""
    if not table.num_rows:
        raise DataError(f"{name} has no rows")
    limit = table.limit_exceeded(max_rejected_fraction)
    if table.records and not limit:
        return
    kinds = [rejection.kind for rejection in table.rejected]
    [(kind, count)] = Counter(kinds).most_common(1)
    first = table.rejected[kinds.index(kind)]
    raise DataError(
        f"{len(table.rejected)} of {counted(table.num_rows, 'row')} ({table.rejected_share:.1%}) cannot be used"
        f"{f', {limit}' if table.records else ''}; "
        f"most common reason, {counted(count, 'time')}: {first.reason!r}, first at {first.source}:{first.line}"
        f"{hint_of(kind)}"
    )


def read_table(source: Source, role: Role, options: ReadingOptions, *, num_rows: int | None = None) -> Table[Any]:
    """Read rows into records and rejections, however many are rejected.

    Args:
        source: files, folders, hub ids or rows: see `rows_of`.
        role: the role for which the rows are read.
        options: how they are parsed.
        num_rows: rows to read; None for all.

    Raises:
        DataError: A source cannot be read; its first row lacks a named column, or all rows lack one of `MAY_BE_EMPTY`;
            or a row is a conversation and the tokenizer has no chat template.
    """
    records: list[Any] = []
    rejected: list[Rejection] = []
    origins: list[int] = []
    labels: dict[int, Mapping[str, Any]] = {}
    num_cut = 0
    columns = columns_of(options.columns, role)
    maybe = {ours: theirs for ours, theirs in columns.items() if ours in MAY_BE_EMPTY}
    always = {ours: theirs for ours, theirs in columns.items() if ours not in maybe}
    firsts: dict[str, Mapping[str, Any]] = {}
    unseen: dict[str, dict[str, str]] = {}
    read = set[int]()
    for origin, row in islice(numbered_rows(source), num_rows):
        read.add(origin)
        if columns and isinstance(row.value, Mapping):
            if row.source not in firsts:
                firsts[row.source] = row.value
                name_missing_columns(row.value, always, role, row.source)
            absent = unseen.get(row.source, maybe).items()
            unseen[row.source] = {ours: theirs for ours, theirs in absent if not column_in(row.value, theirs)}
        options.cuts.clear()
        try:
            if row.fault is not None:
                raise RowError(row.fault)
            record = _PARSERS[role](row.value, options)
            records.append(replace(record, place=row.place) if isinstance(record, Prompt) else record)
            origins.append(origin)
            label = row.value.get("label") if isinstance(row.value, Mapping) else None
            if isinstance(label, Mapping) and {"answer", "person"} <= label.keys():
                labels[len(origins) - 1] = label
            num_cut += bool(options.cuts)
        except RowError as error:
            rejected.append(Rejection(row.source, row.line, str(error), row.preview, error.kind))
        except DataError as error:
            raise DataError(f"{row.place}: {error}") from error
    for name, absent in unseen.items() if num_rows is None else ():
        name_missing_columns(firsts[name], absent, role, name)
    notes = [f"answers are learned regardless of {name!r}" for name in sorted(options.grades)]
    if isinstance(source, Sources) and num_rows is None:
        notes += [f"{name} has no rows" for index, name in enumerate(source.names) if index not in read]
    return Table(records, rejected, num_cut, origins, notes, labels)
