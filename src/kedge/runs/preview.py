"""Previews data as a stage would read it, with a model's tokenizer or, without a model, in characters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from kedge.config import Config
from kedge.data import DataUsage, Preview, Source, Sources, rows_of
from kedge.data.fields import Role, is_conversation, is_given, rename_columns
from kedge.data.forms import is_comparison
from kedge.data.parsing import ReadingOptions
from kedge.data.preview import parts_of
from kedge.data.readers import read_table
from kedge.data.records import table_rows
from kedge.data.tokens import character_tokenizer
from kedge.runs.frozen import tokenizer_of
from kedge.runs.inputs import reading
from kedge_base.errors import ConfigError, DataError
from kedge_base.texts import shortened

ROLES: dict[str, Role] = {
    "sft": "demonstrations",
    "reward": "comparisons",
    "critic": "prompts",
    "ppo": "prompts",
    "generate": "prompts",
    "evaluate": "prompts",
}
_ANSWERED = {"completion", "messages", "conversations", "conversation", "output", "text", "labels"}
_SHOWN = 60
"""Maximum characters shown of a column's value."""


def preview_data(
    config: Config,
    source: Source,
    *,
    stage: str | None = None,
    num_examples: int = 2,
    num_rows: int | None = None,
) -> Preview:
    """Read rows of a source as a stage would, without training anything.

    Args:
        config: `data` says how rows are read; `model` names the tokenizer, None counts characters.
        source: A source as in `rows_of`.
        stage: sft, reward, critic, ppo, generate or evaluate; None guesses it from the columns of the first row.
        num_examples: Rows to show.
        num_rows: Rows to read; None for all.

    Raises:
        KedgeError: The source cannot be read or is empty, a named column is missing, or there is no such stage.
    """
    if stage is not None and stage not in list(ROLES):
        raise ConfigError(f"stage {stage!r} reads no data of its own; choose one of {', '.join(ROLES)}")
    if not isinstance(source, (str, Sources)) and isinstance(source, Iterable):
        source = list(table_rows(source, "the data"))  # an iterator could only be read once
    first = next((row.value for row in islice(rows_of(source), 100) if row.fault is None), None)
    stage = stage or _likely_stage(first, config.data.columns)
    role = ROLES[stage]
    tokenizer = tokenizer_of(config, config.model) if config.model else None
    limits = {} if tokenizer is not None else {"max_prompt_tokens": None, "max_length": None}
    options = ReadingOptions(**{**reading(config, role, tokenizer or character_tokenizer()), **limits})
    table = read_table(source, role, options, num_rows=num_rows)
    if not table.num_rows:
        raise DataError(f"{source if isinstance(source, str) else 'the data'} has no rows")
    parts = [parts_of(record, options.tokenizer, display=False) for record in table.records]
    lengths: dict[str, list[int]] = {}
    for each in parts:
        for part in each:
            lengths.setdefault("rank" if part.name.startswith("rank") else part.name, []).append(part.length)
    if role != "prompts" and len(lengths) > 1:
        together = sum if role == "demonstrations" else max  # the turns of one row, or answers with a row each
        lengths["prompt and answer"] = [
            sum(part.length for part in each if part.name == "prompt")
            + together(part.length for part in each if part.name != "prompt")
            for each in parts
        ]
    names = {"max_prompt_tokens=": "data.max_prompt_tokens=", "max_length=": "data.max_length="}
    notes = ["only the first rows were read"] if table.num_rows == num_rows else []
    if table.records and (limit := table.limit_exceeded(config.data.max_rejected_fraction)):
        notes.append(f"{stage} refuses that many: {table.rejected_share:.1%}, {limit}")
    usage = DataUsage.of(table, names, further=notes)
    return Preview(
        stage=stage,
        usage=usage,
        columns={str(name): shortened(repr(value), _SHOWN) for name, value in first.items()}
        if isinstance(first, Mapping)
        else {},
        lengths=lengths,
        examples=[parts_of(record, options.tokenizer) for record in table.records[:num_examples]],
        unit="tokens" if tokenizer is not None else "characters",
    )


def _likely_stage(first: Any, columns: Mapping[str, str]) -> str:
    if not isinstance(first, Mapping):
        answered = is_conversation(first) and {first[-1].get("role"), first[-1].get("from")} & {"assistant", "gpt"}
        return "sft" if answered else "ppo"
    renamed = rename_columns(first, columns)
    fields = {name: value for name, value in renamed.items() if is_given(renamed, name)}
    if is_comparison(fields):
        return "reward"
    return "sft" if fields.keys() & _ANSWERED else "ppo"
