"""Runs so small that nobody asks whether they fit."""

from __future__ import annotations

from pathlib import Path

from kedge.config import Config
from kedge.errors import KedgeError
from kedge.models.pretrained import base_source
from kedge.plan.shape import read_shape

__all__ = ["is_small"]

LEAST = 2**28
"""Bytes below which a run is not planned."""


def is_small(config: Config, stage: str) -> bool:
    """Whether a generous bound is far below any machine's memory; reads a local config.json alone.

    Args:
        config: The resolved configuration.
        stage: sft, reward, critic or ppo.
    """
    source = (config.reward_model.base if stage == "reward" else None) or config.model
    try:
        shape = read_shape(Path(base_source(str(source))))  # of an adapter, its base
    except KedgeError:
        return False
    samples = stage in ("critic", "ppo")
    rows, longest = _rows(config, stage)
    tokens = min(config.runtime.first_pass_tokens or rows * longest, rows * longest)
    models = 3 + len(config.reward) if samples else 1
    states = 400 * shape.layers * shape.hidden * tokens
    logits = 40 * min(2**24, tokens * shape.vocabulary)
    cache = rows * longest * 2 * shape.key_value_bytes if samples else 0
    return 16 * models * shape.parameters + states + logits + cache < LEAST


def _rows(config: Config, stage: str) -> tuple[int, int]:
    """The rows of an update or a step, and a bound on their tokens."""
    if stage == "sft":
        data, count, longest = config.data.demonstrations, config.sft.batch_size, config.data.max_length
    elif stage == "reward":
        data, count, longest = config.data.comparisons, config.reward_model.batch_size, 2 * config.data.max_length
    else:
        each = config.critic.num_responses if stage == "critic" else config.rollout.num_responses
        return config.rollout.num_prompts * each, config.data.max_prompt_tokens + config.rollout.max_new_tokens
    return count, min(longest, _longest_line(data))


def _longest_line(names: list[str]) -> int:
    """Bytes of the longest line of small local files, at least as many as its tokens; else a number above all."""
    longest = 0
    for name in names:
        path = Path(name)
        if path.suffix != ".jsonl" or not path.is_file() or path.stat().st_size > LEAST // 2**8:
            return LEAST
        longest = max(longest, *map(len, path.read_bytes().splitlines() or [b""]))
    return longest or LEAST
