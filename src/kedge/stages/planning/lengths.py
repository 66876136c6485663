"""The lengths of a stage's rows: from a sample of its data, or from its settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from kedge.config import Config
from kedge.data import Sources
from kedge.data.parsing import ReadingOptions
from kedge.data.readers import read_table
from kedge.data.tokens import encode_example, encode_prompt
from kedge.errors import KedgeError
from kedge.models import load_tokenizer

__all__ = ["Lengths", "demonstration_lengths", "prompt_lengths"]

SAMPLE = 256
"""Rows that are read."""


@dataclass(frozen=True)
class Lengths:
    """Tokens of some rows.

    Attributes:
        prompts: Of each prompt.
        completions: Of each answer; empty for prompts.
        origin: Where they are from, for the report.
        rows: Rows of the data, if all were read.
        assumed: Whether no data was read.
    """

    prompts: tuple[int, ...]
    completions: tuple[int, ...] = ()
    origin: str = "settings"
    rows: int | None = None
    assumed: bool = False


def prompt_lengths(config: Config) -> Lengths:
    """Lengths of `data.prompts`; the longest that the settings allow if they cannot be read."""
    table = _read(config, "prompts", config.data.prompts)
    if table is None:
        return Lengths((config.data.max_prompt_tokens,), origin="data.max_prompt_tokens", assumed=True)
    tokenizer, records, rows = table
    found = tuple(len(encode_prompt(tokenizer, record.text)) for record in records)
    return Lengths(found, origin=f"the first {len(found):,} prompts", rows=rows)


def demonstration_lengths(config: Config, role: Literal["demonstrations", "comparisons"]) -> Lengths:
    """Lengths of prompts and answers, of comparisons one answer after the other; else the longest that are allowed."""
    table = _read(config, role, getattr(config.data, role))
    if table is None:
        half = config.data.max_length // 2
        return Lengths((half,), (config.data.max_length - half,), origin="data.max_length", assumed=True)
    tokenizer, records, rows = table
    answers = [(record.prompt, answer) for record in records for answer in _answers(record)]
    encoded = [encode_example(tokenizer, prompt, answer) for prompt, answer in answers]
    prompts, completions = ([len(getattr(each, name)) for each in encoded] for name in ("prompt", "completion"))
    return Lengths(tuple(prompts), tuple(completions), f"the first {len(records):,} rows", rows)


def _answers(record: Any) -> list[str]:
    if hasattr(record, "completion"):
        return [record.completion]
    return [record.chosen, record.rejected] if hasattr(record, "chosen") else list(record.responses)


def _read(config: Config, role: Any, sources: list[str]) -> tuple[Any, list[Any], int | None] | None:
    if not sources or config.model is None:
        return None
    data = config.data
    try:
        trusted = config.runtime.trust_remote_code
        tokenizer = load_tokenizer(config.model, trust_remote_code=trusted, chat_template=data.chat_template)
    except KedgeError:  # a config.json is enough for a plan
        return None
    options = ReadingOptions(
        tokenizer,
        data.template,
        data.max_prompt_tokens if role == "prompts" else None,
        None if role == "prompts" else data.max_length,
        data.truncate,
        data.columns,
        data.train_on,
    )
    table = read_table(Sources(tuple(sources)), role, options, num_rows=SAMPLE)
    if not table.records:
        return None
    return tokenizer, table.records, len(table.records) if len(table.records) < SAMPLE else None
