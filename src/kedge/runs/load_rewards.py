"""Loads a stage's rewards, from the configuration or from Python arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from transformers import PreTrainedTokenizerBase

from kedge.config import Config
from kedge.output import REWARD_LOG
from kedge.rewards import CallLimits, RewardSpec, RewardTerm, WeightedReward, load_reward
from kedge.runs.run import Run

__all__ = ["Rewards", "configured_rewards", "load_rewards"]

Rewards: TypeAlias = "RewardSpec | RewardTerm | Sequence[RewardSpec | RewardTerm]"
"""One or several reward models and functions, as `load_reward` accepts them."""


def load_rewards(rewards: Rewards, config: Config, run: Run, tokenizer: PreTrainedTokenizerBase) -> WeightedReward:
    """Load rewards on the run's device; errors as in `load_reward`.

    Args:
        rewards: The reward models and functions.
        config: Source of the `runtime` and `reward_functions` settings.
        run: Source of the device, the precision, and the folder for the functions' output.
        tokenizer: The policy's.
    """
    return load_reward(
        rewards,
        policy_tokenizer=tokenizer,
        device=run.device,
        trust_remote_code=config.runtime.trust_remote_code,
        micro_batch_tokens=config.runtime.micro_batch_tokens,
        precision=run.precision,
        limits=_call_limits(config),
        log=run.folder / REWARD_LOG,
    )


def configured_rewards(config: Config) -> list[RewardTerm]:
    """The terms of `config.reward`, for `load_reward`."""
    return [RewardTerm(term.source, term.weight, term.settings, term.name) for term in config.reward]


def _call_limits(config: Config) -> CallLimits:
    settings = config.reward_functions
    return CallLimits(
        timeout=settings.timeout,
        startup_timeout=settings.startup_timeout,
        retries=settings.retries,
        on_error=settings.on_error,
        error_score=settings.error_score,
        memory_growth=settings.memory_growth * 2**30,
    )
