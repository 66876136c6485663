"""Loads prompts for sampling: within the context's limit, and with the same columns in every row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from kedge.config import Config
from kedge.data import Prompt, Sources, read_prompts
from kedge.runs.run import REJECTED_FILE, Run

__all__ = ["load_prompts"]


def load_prompts(
    config: Config,
    run: Run,
    tokenizer: PreTrainedTokenizerBase,
    *,
    room: int | None,
    prompts: Sequence[Any] | None = None,
    role: Literal["prompts", "eval_prompts"] = "prompts",
) -> list[Prompt]:
    """Read `config.data.prompts`, or prompts in its place; a column that any row has is present in all of them.

    Args:
        config: Names the data and its limits.
        run: Its folder receives the unusable rows.
        tokenizer: The policy's tokenizer; renders conversations and measures lengths.
        room: Longest prompt that the context allows, from `room_for_prompt`.
        prompts: Texts or rows in place of the configured ones.
        role: The field of `data` that names the prompts.

    Raises:
        DataError: The data cannot be read, or too many rows are unusable.
    """
    data = config.data
    limit = data.max_prompt_tokens if room is None else min(data.max_prompt_tokens, room)
    table = read_prompts(
        Sources(tuple(getattr(data, role))) if prompts is None else prompts,
        tokenizer=tokenizer,
        max_prompt_tokens=limit,
        template=data.template,
        truncate=data.truncate,
        columns=data.columns,
        max_rejected_fraction=data.max_rejected_fraction,
        rejected_to=run.folder / REJECTED_FILE,
    )
    own = limit == data.max_prompt_tokens
    name = f"data.max_prompt_tokens={limit}" if own else f"the {limit} tokens that the context leaves"
    sources = getattr(data, role) if prompts is None else ()
    run.data.note(role, table, sources, tokenizer, {f"max_prompt_tokens={limit}": name})
    # Missing columns become None: a reward function that takes a column must get it for every response.
    names = dict.fromkeys(name for record in table.records for name in record.columns)
    return [replace(record, columns={name: record.columns.get(name) for name in names}) for record in table.records]
