"""Reads sources into records and accounts for every row that cannot be used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kedge.data.fields import Role, columns_of, name_missing_columns
from kedge.data.parsing import ReadingOptions, Template, TrainOn, parse_comparison, parse_demonstration, parse_prompt
from kedge.data.records import (
    MAX_REJECTED_FRACTION,
    Comparison,
    Demonstration,
    Prompt,
    Ranking,
    Rejection,
    Row,
    RowError,
    Table,
    check_rejections,
    write_rejections,
)
from kedge.data.sources import Source, numbered_rows
from kedge.data.truncation import Truncate
from kedge.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["read_comparisons", "read_demonstrations", "read_prompts", "read_table"]

_PARSERS: dict[str, Callable[[object, ReadingOptions], Any]] = {
    "demonstrations": parse_demonstration,
    "pretraining": parse_demonstration,
    "comparisons": parse_comparison,
    "prompts": parse_prompt,
}


def read_demonstrations(
    source: Source,
    *,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None = None,
    max_prompt_tokens: int | None = None,
    template: Template = "none",
    truncate: Truncate = "never",
    columns: Mapping[str, str] | None = None,
    train_on: TrainOn = "all",
    max_rejected_fraction: float = MAX_REJECTED_FRACTION,
    rejected_to: Path | None = None,
) -> Table[Demonstration]:
    """Answers to imitate: `prompt` + `completion`, `messages`, `text`, or TL;DR posts with their `summary`.

    Args:
        source: files, folders, hub ids or rows: see `rows_of`.
        tokenizer: renders conversations and measures lengths.
        max_length: the longest prompt with its completion, tokens, EOS included; None for no limit.
        max_prompt_tokens: the longest prompt, tokens; None for no limit.
        template: `tldr` builds the prompt from `subreddit`, `title` and `post`, cut at a paragraph where necessary.
        truncate: treatment of a plain-text prompt or conversation over a limit: reject the row, or keep the start
            or the end of the prompt (see `truncate_prompt`, `truncate_conversation`). Completions are never cut.
        columns: names of columns, ours → theirs: `{"prompt": "dialogue"}`; see `rename_columns`.
        train_on: the assistant's messages in `messages` that are learned: all of them, or the last one.
        max_rejected_fraction: share of unusable rows above which reading fails, 0 to 1.
        rejected_to: the `rejected.jsonl` that unusable rows are appended to, even if reading then fails.

    Raises:
        DataError: A source cannot be read or has no usable row, too many rows are unusable, or a row is a conversation
            and the tokenizer has no chat template.

    Source: spec §2.
    """
    options = ReadingOptions(tokenizer, template, max_prompt_tokens, max_length, truncate, columns or {}, train_on)
    return _read(source, "demonstrations", options, max_rejected_fraction, rejected_to)


def read_comparisons(
    source: Source,
    *,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None = None,
    max_prompt_tokens: int | None = None,
    template: Template = "none",
    truncate: Truncate = "never",
    columns: Mapping[str, str] | None = None,
    max_rejected_fraction: float = MAX_REJECTED_FRACTION,
    rejected_to: Path | None = None,
) -> Table[Comparison | Ranking]:
    """Preferences: `prompt` + `chosen` + `rejected`, or ranked lists of `prompt` + `responses` + `ranks`.

    Arguments and errors as in `read_demonstrations`; `max_length` applies to every answer, and all answers share one
    cut prompt. Where `truncate` cuts prompts, it also cuts the end of answers that leave them less than half of
    `max_length`.
    """
    options = ReadingOptions(tokenizer, template, max_prompt_tokens, max_length, truncate, columns or {})
    return _read(source, "comparisons", options, max_rejected_fraction, rejected_to)


def read_prompts(
    source: Source,
    *,
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int | None = None,
    template: Template = "none",
    truncate: Truncate = "never",
    columns: Mapping[str, str] | None = None,
    max_rejected_fraction: float = MAX_REJECTED_FRACTION,
    rejected_to: Path | None = None,
) -> Table[Prompt]:
    """Prompts to sample responses to: `prompt`, `messages`, `text`, TL;DR posts or bare strings.

    Arguments and errors as in `read_demonstrations`.
    """
    options = ReadingOptions(tokenizer, template, max_prompt_tokens, truncate=truncate, columns=columns or {})
    return _read(source, "prompts", options, max_rejected_fraction, rejected_to)


def read_table(source: Source, role: Role, options: ReadingOptions, *, num_rows: int | None = None) -> Table[Any]:
    """Read rows into records and rejections, however many are rejected.

    Args:
        source: files, folders, hub ids or rows: see `rows_of`.
        role: the role that the rows are read in.
        options: how they are parsed.
        num_rows: rows to read; None for all.

    Raises:
        DataError: A source cannot be read, its first row lacks a named column, or a row is a conversation and the
            tokenizer has no chat template.
    """
    table: Table[Any] = Table([], [])
    num_cut = 0
    named = set[str]()
    columns = columns_of(options.columns, role)
    for origin, row in islice(numbered_rows(source), num_rows):
        if columns and isinstance(row.value, Mapping) and row.source not in named:
            name_missing_columns(row.value, columns, role, row.source)
            named.add(row.source)
        before = options.cuts.count
        try:
            table.records.append(_PARSERS[role](_decoded(row), options))
            table.origins.append(origin)
            num_cut += options.cuts.count > before
        except RowError as error:
            table.rejected.append(Rejection.of(row, error))
        except DataError as error:
            raise DataError(f"{row.place}: {error}") from error
    return replace(table, num_cut=num_cut)


def _read(
    source: Source, role: Role, options: ReadingOptions, max_rejected_fraction: float, rejected_to: Path | None
) -> Table[Any]:
    table = read_table(source, role, options)
    if rejected_to is not None:
        write_rejections(rejected_to, table.rejected)
    check_rejections(table, name=_name(source), max_rejected_fraction=max_rejected_fraction)
    return table


def _decoded(row: Row) -> object:
    if row.fault is not None:
        raise RowError(row.fault)
    return row.value


def _name(source: Source) -> str:
    return str(source) if isinstance(source, (str, Path)) else "the data"
