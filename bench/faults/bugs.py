"""Bugs common in PPO trainers, each patched into the code for the duration of a run."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import kedge.algorithm.policy_losses
import kedge.models.language
import kedge.rollout.experience
import kedge.stages.sft
import kedge.training.objective
import kedge.training.optimizer
import kedge.training.update
from kedge.algorithm.critic import clipped_value_loss
from kedge.algorithm.experience import CriticOutputs, PolicyOutputs, Rollout
from kedge.algorithm.logprobs import token_logprobs_and_entropy
from kedge.algorithm.masking import aggregate
from kedge.algorithm.policy_losses import clipped_policy_loss
from kedge.algorithm.shaping import shape_rewards
from kedge.data import EncodedExample, encode_example
from kedge.models import ActorCritic, LanguageModel, TokenRows
from kedge.ranks import Ranks
from kedge.rollout import Sampler
from kedge.training.optimizer import clip_gradients

Bug = AbstractContextManager[Any]


def kl_sign_flipped() -> Bug:
    """The KL is rewarded instead of penalized."""

    def flipped(*tensors: Any, kl_coef: float, **options: Any) -> Any:
        return shape_rewards(*tensors, kl_coef=-kl_coef, **options)

    return patch.object(kedge.rollout.experience, "shape_rewards", flipped)


def advantages_flipped() -> Bug:
    """The policy loss uses the negative advantages."""

    def flipped(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *others: Any, **options: Any) -> Any:
        return clipped_policy_loss(logprobs, old_logprobs, -advantages, *others, **options)

    return patch.object(kedge.algorithm.policy_losses, "clipped_policy_loss", flipped)


def entropy_flipped() -> Bug:
    """The entropy bonus is a penalty."""

    def flipped(*tensors: Any, **options: Any) -> Tensor:
        return -aggregate(*tensors, **options)

    return patch.object(kedge.training.objective, "aggregate", flipped)


def critic_frozen() -> Bug:
    """The value loss has a gradient of 0; a warm-up needs one to go through."""

    def without_gradient(values: Tensor, *others: Any, **options: Any) -> Any:
        return clipped_value_loss(values.detach() + 0.0 * values, *others, **options)

    return patch.object(kedge.training.objective, "clipped_value_loss", without_gradient)


def critic_sees_the_prompt_alone() -> Bug:
    """The value of every action is that of the first: the critic does not read the response."""
    read = ActorCritic.critic_outputs
    forward = ActorCritic.forward

    def before_the_response(values: Tensor, rollout: Rollout) -> Tensor:
        return torch.where(rollout.action_mask, values[:, :1], 0.0)

    def alone(self: ActorCritic, rollout: Rollout, **options: Any) -> CriticOutputs:
        outputs = read(self, rollout, **options)
        return replace(outputs, values=before_the_response(outputs.values, rollout))

    def together(self: ActorCritic, rollout: Rollout, **options: Any) -> PolicyOutputs:
        outputs = forward(self, rollout, **options)
        assert outputs.values is not None, "the runs of this bug have a critic"
        return replace(outputs, values=before_the_response(outputs.values, rollout))

    both = ExitStack()
    both.enter_context(patch.object(ActorCritic, "critic_outputs", alone))
    both.enter_context(patch.object(ActorCritic, "forward", together))
    return both


def temperature_ignored() -> Bug:
    """Trainer and reference compute logprobs at temperature 1, regardless of the sampling temperature."""

    def at_one(*tensors: Any, temperature: float, **options: Any) -> Any:
        return token_logprobs_and_entropy(*tensors, temperature=1.0, **options)

    return patch.object(kedge.models.language, "token_logprobs_and_entropy", at_one)


def off_by_one() -> Bug:
    """Trainer and reference read each token's logprob from the previous position."""

    def shifted(logits: Tensor, *others: Any, **options: Any) -> Any:
        return token_logprobs_and_entropy(logits.roll(1, dims=0), *others, **options)

    return patch.object(kedge.models.language, "token_logprobs_and_entropy", shifted)


def dropout_on() -> Bug:
    """Dropout is active in training but not in sampling."""
    read = LanguageModel.hidden
    forward = ActorCritic.forward

    def dropped(self: LanguageModel, rows: TokenRows) -> Tensor:
        return nn.functional.dropout(read(self, rows), 0.1, training=torch.is_grad_enabled())

    def training(self: ActorCritic, rollout: Rollout, **options: Any) -> PolicyOutputs:
        with patch.object(LanguageModel, "hidden", dropped):
            return forward(self, rollout, **options)

    return patch.object(ActorCritic, "forward", training)


def stale_sampler() -> Bug:
    """The sampler gets new weights only every fourth update, and the rollouts do not record it."""
    generate = Sampler.generate
    kept = dict[str, Any]()

    def stale(self: Sampler, prompts: Any, *, policy_version: int = 0, **options: Any) -> Rollout:
        if policy_version % 4 == 0:
            kept.update(model=copy.deepcopy(self.model))
        return generate(replace(self, model=kept["model"]), prompts, policy_version=policy_version, **options)

    return patch.object(Sampler, "generate", stale)


def gradient_spikes() -> Bug:
    """Every eleventh gradient is a thousand times too large."""
    steps = itertools.count(1)

    def spiked(parameters: Sequence[nn.Parameter], max_norm: float | None, ranks: Ranks) -> float:
        if next(steps) % 11 == 0:
            for gradient in (each.grad for each in parameters if each.grad is not None):
                gradient.mul_(1000.0)
        return clip_gradients(parameters, max_norm, ranks)

    return patch.object(kedge.training.optimizer, "clip_gradients", spiked)


def memory_leak() -> Bug:
    """Every update leaks 64 MiB."""
    generate = Sampler.generate
    kept = list[Tensor]()

    def keeping(self: Sampler, *arguments: Any, **options: Any) -> Rollout:
        kept.append(torch.ones(2**24))
        return generate(self, *arguments, **options)

    return patch.object(Sampler, "generate", keeping)


def eos_masked() -> Bug:
    """EOS is used as padding and masked from the loss, so that SFT does not teach stopping."""

    def without_end(*arguments: Any, **options: Any) -> EncodedExample:
        example = encode_example(*arguments, **options)
        return example._replace(completion=example.completion[:-1])

    return patch.object(kedge.stages.sft, "encode_example", without_end)
