"""Rewards as the stages load them: those of the configuration, or what Python handed over in their place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from transformers import PreTrainedTokenizerBase

from kedge.config import Config
from kedge.output import REWARD_LOG
from kedge.rewards import CallRules, RewardSpec, RewardTerm, WeightedReward, load_reward
from kedge.runs.run import Run

__all__ = ["Rewards", "configured_rewards", "load_rewards"]

Rewards: TypeAlias = "RewardSpec | RewardTerm | Sequence[RewardSpec | RewardTerm]"
"""A reward model or function, or several, as `load_reward` takes them."""


def load_rewards(rewards: Rewards, config: Config, run: Run, tokenizer: PreTrainedTokenizerBase) -> WeightedReward:
    """Rewards for responses in `tokenizer`'s tokens, on the run's device; errors as in `load_reward`.

    Args:
        rewards: What scores.
        config: Says whether code beside a model may run, how many tokens a forward pass may have, and how long a
            function may take.
        run: The device and its number format, and the folder for what functions print.
        tokenizer: The policy's.
    """
    return load_reward(
        rewards,
        policy_tokenizer=tokenizer,
        device=run.device,
        trust_remote_code=config.runtime.trust_remote_code,
        micro_batch_tokens=config.runtime.micro_batch_tokens,
        precision=run.precision,
        rules=_call_rules(config),
        log=run.folder / REWARD_LOG,
    )


def configured_rewards(config: Config) -> list[RewardTerm]:
    """`config.reward` as `load_reward` takes it."""
    return [RewardTerm(term.source, term.weight, term.settings, term.name) for term in config.reward]


def _call_rules(config: Config) -> CallRules:
    settings = config.reward_functions
    return CallRules(
        timeout=settings.timeout,
        startup_timeout=settings.startup_timeout,
        retries=settings.retries,
        on_error=settings.on_error,
        error_score=settings.error_score,
        memory_growth=settings.memory_growth * 2**30,
    )
