"""The prompts of a PPO run: those that it trains on, and those held out for evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from kedge.config import Config
from kedge.data import Mixture, Prompt
from kedge.data.prompts import difficulties
from kedge.errors import ConfigError
from kedge.runs.inputs import load_prompts
from kedge.runs.run import Run

__all__ = ["RunPrompts", "load_run_prompts"]


@dataclass(frozen=True)
class RunPrompts:
    """The prompts of a run.

    Attributes:
        train: Prompts to train on.
        held_out: Prompts to evaluate on; empty for a run that does not evaluate.
        mixture: In which shares the first are drawn from their sources; None for every prompt once per pass.
    """

    train: list[Prompt]
    held_out: list[Prompt]
    mixture: Mixture | None

    @property
    def columns(self) -> list[list[str]]:
        """The columns of each part that has prompts."""
        return [list(part[0].columns) for part in (self.train, self.held_out) if part]


def load_run_prompts(
    config: Config,
    run: Run,
    tokenizer: PreTrainedTokenizerBase,
    *,
    room: int | None,
    prompts: Sequence[Any] | None,
    eval_prompts: Sequence[Any] | None,
) -> RunPrompts:
    """Read the prompts; hold some of them out if the run evaluates and has no prompts of its own for that.

    Args:
        config: Names the data and its limits.
        run: Its folder receives the unusable rows.
        tokenizer: The policy's tokenizer.
        room: Longest prompt that the context allows.
        prompts: Texts or rows in place of `config.data.prompts`.
        eval_prompts: Texts or rows in place of `config.data.eval_prompts`.

    Raises:
        DataError: The data cannot be read, or a single prompt cannot be split.
        ConfigError: Nothing is to be held out, or the held-out prompts would not be used.
    """
    evaluation, data = config.ppo, config.data
    has_own = bool(data.eval_prompts) or eval_prompts is not None
    if not evaluation.holds_out and has_own:
        raise ConfigError("data.eval_prompts are only read with ppo.eval_every or ppo.critic_check; neither is set")
    records = load_prompts(config, run, tokenizer, room=room, prompts=prompts)
    held_out: list[Prompt] = []
    rows: list[int] | None = None
    if evaluation.holds_out and has_own:
        every = load_prompts(config, run, tokenizer, room=room, prompts=eval_prompts, role="eval_prompts")
        held_out = every[: evaluation.num_held_out]
        run.data.add("eval_prompts", used=len(held_out))
    elif evaluation.holds_out:
        if not data.eval_fraction:
            field = "eval_every" if evaluation.eval_every is not None else "critic_check"
            raise ConfigError(f"ppo.{field} needs held-out prompts: set data.eval_prompts, or data.eval_fraction > 0")
        share = min(data.eval_fraction, evaluation.num_held_out / len(records))
        split = run.data.split("prompts", records, config, fraction=share)
        records, held_out, rows = split.train, split.eval, split.train_rows
    if data.curriculum is not None:
        difficulties(records, data.curriculum)
    return RunPrompts(records, held_out, run.data.mixture("prompts", config, rows))
