"""Loads demonstrations and comparisons with the limits of the configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from kedge.config import Config
from kedge.data import Comparison, Demonstration, Ranking, Sources, read_comparisons, read_demonstrations
from kedge.runs.run import REJECTED_FILE, Run

__all__ = ["load_comparisons", "load_demonstrations"]


def load_demonstrations(
    config: Config,
    run: Run,
    tokenizer: PreTrainedTokenizerBase,
    *,
    context_length: int | None,
    rows: Sequence[Any] | None = None,
) -> list[Demonstration]:
    """Read `config.data.demonstrations`, or rows in its place.

    Args:
        config: Names the data and its limits.
        run: Its folder receives the unusable rows.
        tokenizer: Renders conversations and measures lengths.
        context_length: Context of the model, in tokens; None for no limit.
        rows: Rows in place of the configured data.

    Raises:
        DataError: The data cannot be read, or too many rows are unusable.
    """
    source = Sources(tuple(config.data.demonstrations)) if rows is None else rows
    reading = _reading(config, run, tokenizer, context_length)
    table = read_demonstrations(source, **reading, train_on=config.data.train_on)
    run.data.note(
        "demonstrations", table, config.data.demonstrations if rows is None else (), tokenizer, _limits(config, reading)
    )
    return table.records


def load_comparisons(
    config: Config,
    run: Run,
    tokenizer: PreTrainedTokenizerBase,
    *,
    context_length: int | None,
    rows: Sequence[Any] | None = None,
) -> list[Comparison | Ranking]:
    """Read `config.data.comparisons`, or rows in its place; arguments and errors as in `load_demonstrations`."""
    source = Sources(tuple(config.data.comparisons)) if rows is None else rows
    reading = _reading(config, run, tokenizer, context_length)
    table = read_comparisons(source, **reading)
    run.data.note(
        "comparisons", table, config.data.comparisons if rows is None else (), tokenizer, _limits(config, reading)
    )
    return table.records


def _reading(
    config: Config, run: Run, tokenizer: PreTrainedTokenizerBase, context_length: int | None
) -> dict[str, Any]:
    data = config.data
    return {
        "tokenizer": tokenizer,
        "max_length": min(data.max_length, context_length or data.max_length),
        "max_prompt_tokens": data.max_prompt_tokens,
        "template": data.template,
        "truncate": data.truncate,
        "columns": data.columns,
        "max_rejected_fraction": data.max_rejected_fraction,
        "rejected_to": run.folder / REJECTED_FILE,
    }


def _limits(config: Config, reading: Mapping[str, Any]) -> dict[str, str]:
    """The names of the limits, by the names that readers use."""
    longest, longest_prompt = reading["max_length"], config.data.max_prompt_tokens
    own = longest == config.data.max_length
    return {
        f"max_prompt_tokens={longest_prompt}": f"data.max_prompt_tokens={longest_prompt}",
        f"max_length={longest}": f"data.max_length={longest}" if own else f"the context of {longest} tokens",
    }
