"""Loads the inputs of a critic's training: the roles of PPO's first update, without its reference."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from kedge.config import Config, PpoConfig, with_values
from kedge.models import ActorCritic
from kedge.runs.inputs import Rewards
from kedge.runs.run import Run
from kedge.stages.ppo.roles import Roles, load_roles
from kedge.stages.ppo.trainer import Trainer
from kedge.training.supervised.returns import ReturnsLoss, SampledReturns

__all__ = ["CriticInputs", "as_first_update", "load_critic_inputs"]

ALL_HELD_OUT = 10**9
"""A bound on the held-out prompts that is never reached: `data.eval_fraction` decides."""


@dataclass(frozen=True)
class CriticInputs:
    """The inputs of a critic's training.

    Attributes:
        config: The configuration of PPO's first update that the critic is for; see `as_first_update`.
        num_prompts: Prompts to sample responses to, besides the held-out ones; None for each of them once.
        roles: Policy, critic, rewards and prompts.
        trainer: Samples and scores as PPO does, without the critic: its values are not needed yet.
    """

    config: Config
    num_prompts: int | None
    roles: Roles
    trainer: Trainer

    def loss(self, sampled: SampledReturns, train_rows: Sequence[int]) -> ReturnsLoss:
        """The loss of the critic on sampled responses, in the unit of the returns to fit to."""
        train = sampled.select(train_rows)
        return ReturnsLoss(
            self.roles.actor_critic,
            sampled,
            center=train.mean,
            unit=train.std,
            value_after_last=self.config.ppo.score_at == "after_last",
            precision=self.trainer.run.precision,
        )

    @property
    def num_responses(self) -> tuple[int, int]:
        """Responses to sample to the training prompts, and to the held-out ones."""
        each = self.config.rollout.num_responses
        prompts = self.num_prompts or len(self.roles.prompts)
        return prompts * each, len(self.roles.held_out) * each

    @property
    def plan(self) -> str:
        """One line about the responses to sample."""
        train, held_out = self.num_responses
        each = self.config.rollout.num_responses
        return (
            f"critic samples {train + held_out:,} responses, {each} per prompt, {held_out:,} of them to held-out "
            f"prompts, at most {self.config.rollout.max_new_tokens} new tokens"
        )

    @property
    def sampling_key(self) -> dict[str, str]:
        """Key of the responses and their returns: hashes of the inputs, and of the settings that they depend on."""
        settings = self.config.model_dump(mode="json", exclude={"out", "checkpoint", "push", "critic", "sft"})
        settings["num_prompts"] = self.num_prompts
        settings["runtime"] = {"seed": self.config.runtime.seed, "precision": self.trainer.run.precision}
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
        return {**self.trainer.run.fingerprint, "settings": digest}

    @property
    def trained(self) -> nn.Module:
        """The model that the stage trains: a separate critic, or the value head."""
        head = self.roles.actor_critic.policy.value_head
        critic = self.roles.actor_critic.critic
        trained = head if critic is None else critic.classifier
        assert trained is not None
        return trained

    @property
    def saved(self) -> nn.Module:
        """The model that a checkpoint contains: the separate critic, or the policy beside the value head."""
        critic = self.roles.actor_critic.critic
        return self.roles.actor_critic.policy.causal if critic is None else critic.classifier


def as_first_update(config: Config, *, holds_out: bool) -> Config:
    """The configuration of PPO's first update, where the KL is 0, with the critic that the stage trains.

    All that shapes a return is as in PPO: the discount, the slot of the score, the scale of the rewards, the score of
    a response without a stop token.

    Args:
        config: The stage's configuration.
        holds_out: Whether there are prompts to measure with.
    """
    settings = config.critic
    advantages = config.ppo
    ppo = PpoConfig.model_validate(
        {
            "critic": settings.kind,
            "critic_init": settings.base,
            "advantage": "to_go",
            "gamma": advantages.gamma,
            "score_at": advantages.score_at,
            "whiten_rewards": advantages.whiten_rewards,
            "kl_coef": 0.0,
            "num_minibatches": 1,
            "eval_every": 1 if holds_out else None,
            "eval_num_prompts": ALL_HELD_OUT,
        }
    )
    plain = config.model_copy(update={"ppo": ppo, "schedules": {}})
    return with_values(
        plain,
        {
            "rollout.num_responses": settings.num_responses,
            "rollout.engine": "builtin",
            "evaluate.judge": None,
            "data.curriculum": None,
        },
    )


def load_critic_inputs(
    config: Config,
    run: Run,
    *,
    prompts: Sequence[Any] | None = None,
    eval_prompts: Sequence[Any] | None = None,
    reward: Rewards | None = None,
) -> CriticInputs:
    """Load policy, critic, rewards and prompts; arguments and errors as in `run_critic`."""
    own = bool(config.data.eval_prompts) or eval_prompts is not None
    first = as_first_update(config, holds_out=own or config.data.eval_fraction > 0)
    roles = load_roles(first, run, prompts=prompts, eval_prompts=eval_prompts, reward=reward)
    policy = roles.actor_critic.policy
    without = replace(roles, actor_critic=ActorCritic(policy)) if roles.actor_critic.critic is not None else roles
    return CriticInputs(first, config.critic.num_prompts, roles, Trainer.of(first, run, without))
