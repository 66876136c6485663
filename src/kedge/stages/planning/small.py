"""Runs so small that nobody asks whether they fit."""

from __future__ import annotations

from pathlib import Path

from kedge.config import Config
from kedge.errors import KedgeError
from kedge.models.hollow import read_blueprint

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
        shape = read_blueprint(str(source), trust_remote_code=config.runtime.trust_remote_code).config
    except KedgeError:
        return False
    text = shape.get_text_config()
    width, layers, vocabulary = text.hidden_size, text.num_hidden_layers, text.vocab_size
    wide = max(8 * width, 4 * (getattr(text, "intermediate_size", None) or 0))
    parameters = width * (2 * vocabulary + layers * (4 * width + wide))
    samples = stage in ("critic", "ppo")
    rows, longest = _rows(config, stage)
    tokens = min(config.runtime.first_pass_tokens or rows * longest, rows * longest)
    models = 3 + len(config.reward) if samples else 1
    states = 400 * layers * width * tokens
    logits = 40 * min(2**24, tokens * vocabulary)
    cache = rows * longest * 8 * layers * width if samples else 0
    return 16 * models * parameters + states + logits + cache < LEAST


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
