"""Loads a stage's rewards, from the configuration or from Python arguments."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from transformers import PreTrainedTokenizerBase

from kedge.config import Config
from kedge.models import Precision
from kedge.models.loading import Bases
from kedge.rewards import CallLimits, RewardSpec, RewardTerm, WeightedReward, load_reward
from kedge.runs.frozen import freeze_models
from kedge.runs.run import Run
from kedge.system.output import REWARD_LOG
from kedge.system.ranks import ALONE, PassTokens, Ranks

__all__ = ["Rewards", "configured_rewards", "load_rewards", "load_rewards_on"]

Rewards: TypeAlias = "RewardSpec | RewardTerm | Sequence[RewardSpec | RewardTerm]"
"""One or several reward models and functions, as `load_reward` accepts them."""


def load_rewards(
    rewards: Rewards,
    config: Config,
    run: Run,
    tokenizer: PreTrainedTokenizerBase,
    *,
    freeze: bool = True,
    bases: Bases | None = None,
) -> WeightedReward:
    """Load rewards on the run's device, and freeze their models; errors as in `load_reward`.

    Args:
        rewards: The reward models and functions.
        config: Source of the `runtime` and `reward_functions` settings.
        run: Source of the device, the precision, and the folder for the functions' output.
        tokenizer: The policy's.
        freeze: False if the caller freezes the models, once it has copied a critic from them.
        bases: Where they find the weights of their bases.
    """
    log = run.folder / REWARD_LOG
    loaded = load_rewards_on(
        rewards,
        config,
        tokenizer,
        device=run.device,
        precision=run.precision,
        log=log,
        micro_batch_tokens=run.micro_batch_tokens,
        bases=bases,
        ranks=run.ranks,
    )
    if freeze:
        freeze_models((each.model for each in loaded.models.values()), config, run)
    return loaded


def load_rewards_on(
    rewards: Rewards,
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    *,
    device: torch.device,
    precision: Precision,
    log: Path | None,
    micro_batch_tokens: PassTokens,
    bases: Bases | None = None,
    ranks: Ranks = ALONE,
) -> WeightedReward:
    """Load rewards without a run; errors as in `load_reward`.

    Args:
        rewards: The reward models and functions.
        config: Source of the `runtime` and `reward_functions` settings.
        tokenizer: The policy's.
        device: The device of the reward models.
        precision: Number format of their matrix products.
        log: The file for the functions' output.
        micro_batch_tokens: Tokens per pass of the models.
        bases: Where the models find the weights of their bases.
        ranks: They share the models' passes; functions run on the first of them.
    """
    return load_reward(
        rewards,
        policy_tokenizer=tokenizer,
        device=device,
        trust_remote_code=config.runtime.trust_remote_code,
        micro_batch_tokens=micro_batch_tokens,
        precision=precision,
        limits=_call_limits(config),
        log=log,
        bases=bases,
        ranks=ranks,
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
