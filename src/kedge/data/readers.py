"""Reads sources into records and accounts for every row that cannot be used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from kedge.data.parsing import parse_comparison, parse_demonstration, parse_prompt
from kedge.data.prompt_answers import ReadingOptions, Template
from kedge.data.records import Comparison, Demonstration, Prompt, Ranking
from kedge.data.rejections import (
    MAX_REJECTED_FRACTION,
    Rejection,
    RowError,
    Table,
    check_rejections,
    write_rejections,
)
from kedge.data.rows import Row
from kedge.data.sources import Source, rows_of
from kedge.data.truncation import Truncate
from kedge.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["read_comparisons", "read_demonstrations", "read_prompts"]

RecordT = TypeVar("RecordT")


def read_demonstrations(
    source: Source,
    *,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None = None,
    max_prompt_tokens: int | None = None,
    template: Template = "none",
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
        max_rejected_fraction: share of unusable rows above which reading fails, 0 to 1.
        rejected_to: the `rejected.jsonl` that unusable rows are appended to, even if reading then fails.

    Raises:
        DataError: A source cannot be read or has no usable row, too many rows are unusable, or a row is a conversation
            and the tokenizer has no chat template.

    Source: spec §2.
    """
    options = ReadingOptions(tokenizer, template, max_prompt_tokens, max_length)
    return _read(source, lambda value: parse_demonstration(value, options), max_rejected_fraction, rejected_to)


def read_comparisons(
    source: Source,
    *,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None = None,
    max_prompt_tokens: int | None = None,
    template: Template = "none",
    max_rejected_fraction: float = MAX_REJECTED_FRACTION,
    rejected_to: Path | None = None,
) -> Table[Comparison | Ranking]:
    """Preferences: `prompt` + `chosen` + `rejected`, or ranked lists of `prompt` + `responses` + `ranks`.

    Arguments and errors as in `read_demonstrations`; `max_length` applies to every answer.
    """
    options = ReadingOptions(tokenizer, template, max_prompt_tokens, max_length)
    return _read(source, lambda value: parse_comparison(value, options), max_rejected_fraction, rejected_to)


def read_prompts(
    source: Source,
    *,
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int | None = None,
    template: Template = "none",
    truncate: Truncate = "never",
    max_rejected_fraction: float = MAX_REJECTED_FRACTION,
    rejected_to: Path | None = None,
) -> Table[Prompt]:
    """Prompts to sample responses to: `prompt`, `messages`, `text`, TL;DR posts or bare strings.

    Arguments and errors as in `read_demonstrations`. A plain-text prompt that is too long is rejected
    (`truncate="never"`) or cut to its first (`keep_start`) or last (`keep_end`) tokens. Conversations are never cut,
    since that would cut into the template.
    """
    options = ReadingOptions(tokenizer, template, max_prompt_tokens, truncate=truncate)
    return _read(source, lambda value: parse_prompt(value, options), max_rejected_fraction, rejected_to)


def _read(
    source: Source,
    record_of: Callable[[object], RecordT],
    max_rejected_fraction: float,
    rejected_to: Path | None,
) -> Table[RecordT]:
    table: Table[RecordT] = Table([], [])
    for row in rows_of(source):
        try:
            table.records.append(record_of(_decoded(row)))
        except RowError as error:
            table.rejected.append(Rejection.of(row, str(error)))
        except DataError as error:
            raise DataError(f"{row.place}: {error}") from error
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
