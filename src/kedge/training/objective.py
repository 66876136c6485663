"""The total loss of one PPO step, and the figures that describe it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kedge.algorithm.critic import clipped_value_loss
from kedge.algorithm.experience import Experience
from kedge.algorithm.kl import kl_loss
from kedge.algorithm.masking import Aggregation, aggregate, aggregation_normalizer
from kedge.algorithm.policy_losses import (
    PolicyLoss,
    clipped_policy_loss,
    kl_penalty_policy_loss,
    unclipped_policy_loss,
)
from kedge.models import ResponseOutputs

__all__ = ["Divisors", "Objective", "Surrogate", "Terms"]

Surrogate = Literal["clipped", "unclipped", "kl_penalty"]


@dataclass(frozen=True)
class Divisors:
    """What the sums over a minibatch are divided by. They are the whole minibatch's: no split changes the gradient.

    Attributes:
        policy: Divisor of the policy, entropy and KL terms, by the aggregation.
        value: Divisor of the value term; it counts one slot more where the score stands after the last token.
        tokens: Counted response tokens: the divisor of the policy's figures, whatever the aggregation.
        value_slots: Counted value slots: the divisor of the critic's figures.
    """

    policy: int
    value: int
    tokens: int
    value_slots: int


@dataclass(frozen=True)
class Terms:
    """The loss of some rows as their share of the minibatch's, and their share of its figures; both add up.

    Attributes:
        loss: The share of the total loss.
        figures: Shares of the minibatch's means, by metric name; of `…_max` and `…_min` figures, the rows' own
            extreme. They stay on the device.
    """

    loss: Tensor
    figures: dict[str, Tensor]


@dataclass(frozen=True)
class Objective:
    """total = policy + c_v·value − c_e·entropy (+ β·KL to the reference)

    Args:
        policy_loss: The surrogate: `clipped` (PPO), `unclipped`, or `kl_penalty` (the ablation's third).
        clip_range: ε: the ratio's leash below 1, and above.
        clip_range_high: The leash above 1 where it differs (clip-higher).
        dual_clip: Bound c > 1 on the loss of tokens with negative advantage, or None.
        surrogate_kl_coef: β of the `kl_penalty` surrogate, which leads to the old policy.
        value_clip_range: ε_v, absolute, in units of the return; None for plain squared error.
        value_coef: c_v, on top of the value loss's own ½.
        value_unit: What values and returns are measured in: the value loss and its clip see V/unit. 1 is the reward's
            own unit, as published.
        entropy_coef: c_e.
        kl_coef: β of the KL to the reference as a loss; 0 where the KL is in the reward.
        kl_estimator: Which estimator of that KL.
        aggregation: How token losses become one number.
        constant_length: The divisor per response, in tokens, of `constant`.
        value_after_last: The critic is also trained on the state after the last token (`score_at: after_last`).

    Source: PPO eq. 9; spec §6.27–32.
    """

    policy_loss: Surrogate = "clipped"
    clip_range: float = 0.2
    clip_range_high: float | None = None
    dual_clip: float | None = None
    surrogate_kl_coef: float = 1.0
    value_clip_range: float | None = 0.2
    value_coef: float = 0.5
    value_unit: float = 1.0
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    kl_estimator: Literal["k1", "k2", "k3"] = "k2"
    aggregation: Aggregation = "token"
    constant_length: int | None = None
    value_after_last: bool = False

    @property
    def needs_entropy_gradient(self) -> bool:
        """Whether the entropy is part of the loss, or a figure alone."""
        return self.entropy_coef != 0.0

    def divisors(self, minibatch: Experience) -> Divisors:
        """What the terms of this minibatch are divided by, however it is split (spec §6.30)."""
        mask = minibatch.rollout.response_mask
        return Divisors(
            policy=int(aggregation_normalizer(mask, aggregation=self.aggregation)),
            value=int(aggregation_normalizer(minibatch.reward_mask, aggregation=self.aggregation)),
            tokens=int(mask.sum()),
            value_slots=int(minibatch.reward_mask.sum()),
        )

    def __call__(
        self, outputs: ResponseOutputs, experience: Experience, divisors: Divisors, *, train_policy: bool = True
    ) -> Terms:
        """The loss of some rows as a share of their minibatch's.

        Args:
            outputs: What the current weights say about the rows.
            experience: The same rows' frozen experience.
            divisors: Their minibatch's.
            train_policy: False while the critic warms up: only the value term is in the loss.
        """
        mask = experience.rollout.response_mask
        averaging = {"aggregation": self.aggregation, "constant_length": self.constant_length}
        policy = self._policy_loss(outputs, experience, {**averaging, "normalizer": divisors.policy})
        value = clipped_value_loss(
            outputs.values / self.value_unit,
            experience.values / self.value_unit,
            experience.returns / self.value_unit,
            experience.reward_mask,
            clip_range=self.value_clip_range,
            normalizer=divisors.value,
            **averaging,
        )
        loss = self.value_coef * value.loss
        if train_policy:
            loss = loss + policy.loss
            if self.entropy_coef:
                entropy = aggregate(outputs.entropy, mask, normalizer=divisors.policy, **averaging)
                loss = loss - self.entropy_coef * entropy
            if self.kl_coef:
                loss = loss + self.kl_coef * self._reference_kl(outputs, experience, divisors, averaging)
        share = policy.num_tokens / divisors.tokens
        value_share = experience.reward_mask.sum() / divisors.value_slots
        figures = {
            "loss/total": loss,
            "policy/loss": policy.loss,
            "policy/approx_kl": share * policy.approx_kl,
            "policy/clip_fraction": share * policy.clip_fraction,
            "policy/entropy": torch.where(mask, outputs.entropy, 0.0).sum() / divisors.tokens,
            "policy/ratio_mean": share * policy.ratio_mean,
            "policy/ratio_min": policy.ratio_min,
            "policy/ratio_max": policy.ratio_max,
            "value/loss": value.loss,
            "value/clip_fraction": value_share * value.clip_fraction,
        }
        return Terms(loss, {name: figure.detach() for name, figure in figures.items()})

    def _policy_loss(self, outputs: ResponseOutputs, experience: Experience, averaging: dict[str, Any]) -> PolicyLoss:
        tensors = (outputs.logprobs, experience.old_logprobs, experience.advantages, experience.rollout.response_mask)
        if self.policy_loss == "unclipped":
            return unclipped_policy_loss(*tensors, **averaging)
        if self.policy_loss == "kl_penalty":
            return kl_penalty_policy_loss(*tensors, kl_coef=self.surrogate_kl_coef, **averaging)
        return clipped_policy_loss(
            *tensors,
            clip_range=self.clip_range,
            clip_range_high=self.clip_range_high,
            dual_clip=self.dual_clip,
            **averaging,
        )

    def _reference_kl(
        self, outputs: ResponseOutputs, experience: Experience, divisors: Divisors, averaging: dict[str, Any]
    ) -> Tensor:
        assert experience.ref_logprobs is not None, "a KL in the loss needs the reference's log probabilities"
        return kl_loss(
            outputs.logprobs,
            experience.ref_logprobs,
            experience.rollout.response_mask,
            estimator=self.kl_estimator,
            normalizer=divisors.policy,
            **averaging,
        )
