"""The total loss of a PPO step and its metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal

import torch
from jaxtyping import Bool
from torch import Tensor

from kedge.algorithm.critic import Bins, clipped_value_loss, histogram_value_loss
from kedge.algorithm.experience import CriticOutputs, Experience, PolicyOutputs
from kedge.algorithm.masking import Aggregation, Averaging, aggregate, aggregation_normalizer, masked_whiten
from kedge.algorithm.policy_losses import Ratio, Surrogate, Tokens, is_scaled_by_advantages, positive_nll
from kedge.algorithm.shaping import KLEstimator, kl_loss
from kedge.training.learner import B, Batch

Reduction = Literal["mean", "max", "min"]


@dataclass(frozen=True)
class Metric:
    """A value and its reduction.

    Attributes:
        value: A scalar on the device. For `mean` it is the micro-batch's share of the minibatch mean; shares add up.
        reduce: `mean`: summed over micro-batches, then averaged over steps. `max`, `min`: the extreme over both.
    """

    value: Tensor
    reduce: Reduction = "mean"

    def neutral(self) -> Metric:
        """Make a metric that leaves a total with this reduction unchanged."""
        neutral = {"mean": 0.0, "max": -math.inf, "min": math.inf}[self.reduce]
        return Metric(torch.full_like(self.value, neutral), self.reduce)


@dataclass(frozen=True)
class Divisors:
    """Divisors of the sums over a minibatch. They are the same for all of its micro-batches, so splitting it is exact.

    Attributes:
        policy: Divisor of the policy, entropy and KL terms; depends on the aggregation.
        value: Divisor of the value term, over the reward mask.
        actions: Number of actions: the divisor of the policy's metrics, for every aggregation.
        value_slots: Number of value slots: the divisor of the critic's metrics.
        positive: Number of actions in positive examples, at least 1.
    """

    policy: float
    value: float
    actions: float
    value_slots: float
    positive: float = 1

    def scaled(self, share: float) -> Divisors:
        """Return the divisors of a sum over a random share of the rows whose expected value is the whole sum's."""
        return Divisors(*(share * getattr(self, each.name) for each in fields(self)))


@dataclass(frozen=True)
class Terms:
    """A micro-batch's share of the minibatch's loss and metrics; shares add up.

    Attributes:
        loss: The share of the total loss.
        metrics: The share of each metric by name, on the device.
    """

    loss: Tensor
    metrics: dict[str, Metric]

    def without_effect(self) -> Terms:
        """Return the terms with a zero gradient and metrics that leave totals unchanged."""
        return Terms(self.loss * 0.0, {name: each.neutral() for name, each in self.metrics.items()})


@dataclass(frozen=True, kw_only=True)
class Objective:
    """total = policy + c_v·value − c_e·entropy (+ β·KL to the reference) (+ μ·NLL of positive examples)

    Args:
        surrogate: The policy loss, with its own settings, such as its clip range.
        ratio: Its ratio: each token's own, or the geometric mean over the response (GSPO) or the turn.
        value_clip_range: ε_v, absolute, in `value_unit`; None for the unclipped error. Unused with bins.
        value_coef: c_v, on top of the value loss's own ½.
        value_unit: Values and returns are divided by it in the value loss and its clip; above 0. 1 keeps the reward's
            unit, as published. Unused with bins: their loss has no unit.
        value_bins: The bins of a critic that predicts a histogram: its loss is a cross-entropy. None for a scalar.
        entropy_coef: c_e.
        kl_coef: β of the KL to the reference as a loss; 0 if the KL is in the reward.
        kl_estimator: Estimator of that KL.
        whitens_minibatches: Normalize the advantages of every minibatch to mean 0 and variance 1, as OpenAI's baselines
            do in control.
        positive_nll_coef: μ of the negative log likelihood of `batch.positive`.
        aggregation: Reduction of token losses to a scalar.
        constant_length: Divisor per response, in tokens, for `aggregation="constant"`.
        train_policy: False while the critic warms up: only the value term is in the loss.

    Source: PPO eq. 9; spec §6.27–32.
    """

    surrogate: Surrogate
    value_clip_range: float | None
    value_coef: float
    ratio: Ratio = "token"
    value_unit: float = 1.0
    value_bins: Bins | None = None
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    kl_estimator: KLEstimator = "k2"
    positive_nll_coef: float = 0.0
    whitens_minibatches: bool = False
    aggregation: Aggregation = "token"
    constant_length: int | None = None
    train_policy: bool = True

    def prepared(self, minibatch: B) -> B:
        """Return a minibatch with the advantages that its loss uses, normalized if configured."""
        if not self.whitens_minibatches or len(minibatch.advantages) < 2:
            return minibatch
        return minibatch.with_advantages(masked_whiten(minibatch.advantages, minibatch.action_mask))

    def divisors(self, minibatch: Batch) -> Divisors:
        """Compute the divisors of this minibatch, independent of its split into micro-batches (spec §6.30)."""
        mask = minibatch.action_mask
        slots = minibatch.reward_mask
        counts = policy, value = int(mask.sum()), int(slots.sum())
        if self.aggregation != "token":
            policy, value = (int(aggregation_normalizer(each, aggregation=self.aggregation)) for each in (mask, slots))
        return Divisors(
            policy=policy,
            value=value,
            actions=counts[0],
            value_slots=counts[1],
            positive=1 if minibatch.positive is None else max(1, int(mask[minibatch.positive].sum())),
        )

    def rows_with_gradient(self, minibatch: Batch, *, trains_critic: bool) -> Bool[Tensor, " batch"]:
        """Find the rows that can have a gradient; that of the others is 0 for all weights of the model.

        With the policy loss alone, a row has no gradient if its advantages are 0, as in a group with equal scores.

        Returns:
            True for such a row; without any, True for all, since the optimizer's moments still move the weights.
        """
        weights = minibatch.advantages.masked_fill(~minibatch.action_mask, 0.0)
        if minibatch.importance_weights is not None:
            weights = weights * minibatch.importance_weights
        found = (weights != 0.0).any(-1)
        other_terms = trains_critic or self.entropy_coef or self.kl_coef or self.positive_nll_coef
        if other_terms or not is_scaled_by_advantages(self.surrogate) or not found.any():
            return torch.ones_like(found)
        return found

    def __call__(self, outputs: PolicyOutputs, batch: Batch, divisors: Divisors) -> Terms:
        """Compute a micro-batch's share of the minibatch's loss.

        Args:
            outputs: Log probabilities, entropy and values of the rows under the current weights.
            batch: The experience of the same rows.
            divisors: The minibatch's.
        """
        losses: list[Tensor] = []
        policy, metrics = self._policy_term(outputs, batch, divisors)
        if outputs.values is not None:
            value, value_metrics = self._value_term(outputs, batch, divisors)
            losses.append(value)
            metrics |= value_metrics
        if self.train_policy:
            averaging = self._averaging(divisors.policy)
            losses.append(policy)
            if self.entropy_coef:
                losses.append(-self.entropy_coef * aggregate(outputs.entropy, batch.action_mask, **averaging))
            if self.kl_coef:
                assert batch.ref_logprobs is not None, "a KL in the loss needs the reference's log probabilities"
                estimator = self.kl_estimator
                kl = kl_loss(outputs.logprobs, batch.ref_logprobs, batch.action_mask, estimator=estimator, **averaging)
                losses.append(self.kl_coef * kl)
            if self.positive_nll_coef:
                assert batch.positive is not None, "imitation needs to know the positive examples"
                nll = positive_nll(outputs.logprobs, batch.action_mask, batch.positive, normalizer=divisors.positive)
                losses.append(self.positive_nll_coef * nll)
                metrics["loss/positive_nll"] = Metric(losses[-1])
        loss = sum(losses[1:], losses[0])
        return Terms(loss, _detached({"loss/total": Metric(loss), **metrics}))

    def critic_terms(self, outputs: CriticOutputs, batch: Batch, divisors: Divisors) -> Terms:
        """Compute the value term, c_v·value, for a step that trains only the critic; arguments as in `__call__`."""
        loss, metrics = self._value_term(outputs, batch, divisors)
        return Terms(loss, _detached(metrics))

    def _averaging(self, divisor: float) -> Averaging:
        return {"aggregation": self.aggregation, "constant_length": self.constant_length, "normalizer": divisor}

    def _policy_term(
        self, outputs: PolicyOutputs, batch: Batch, divisors: Divisors
    ) -> tuple[Tensor, dict[str, Metric]]:
        mask = batch.action_mask
        tokens = Tokens.of(
            outputs.logprobs,
            batch.old_logprobs,
            batch.advantages,
            mask,
            ratio=self.ratio,
            turn_starts=batch.rollout.turn_starts if self.ratio == "turn" and isinstance(batch, Experience) else None,
            importance_weights=batch.importance_weights,
            kl=outputs.kl,
            **self._averaging(divisors.policy),
        )
        policy = self.surrogate(tokens)
        share = policy.num_tokens / divisors.actions
        held = policy.dual_clip_fraction
        return policy.loss, {
            "policy/loss": Metric(policy.loss),
            "policy/approx_kl": Metric(share * policy.approx_kl),
            "policy/clip_fraction": Metric(share * policy.clip_fraction),
            **({} if held is None else {"policy/dual_clip_fraction": Metric(share * held)}),
            "policy/entropy": Metric(torch.where(mask, outputs.entropy, 0.0).sum() / divisors.actions),
            "policy/ratio_mean": Metric(share * policy.ratio_mean),
            "policy/ratio_min": Metric(policy.ratio_min, "min"),
            "policy/ratio_max": Metric(policy.ratio_max, "max"),
        }

    def _value_term(
        self, outputs: PolicyOutputs | CriticOutputs, batch: Batch, divisors: Divisors
    ) -> tuple[Tensor, dict[str, Metric]]:
        mask = batch.reward_mask
        averaging = self._averaging(divisors.value)
        share = mask.sum() / divisors.value_slots
        if self.value_bins is not None:
            assert outputs.value_logits is not None, "a histogram's loss needs its logits"
            histogram = histogram_value_loss(
                outputs.value_logits, batch.returns, mask, bins=self.value_bins, **averaging
            )
            metrics = {"value/loss": Metric(histogram.loss), "value/outside_support": Metric(share * histogram.outside)}
            return self.value_coef * histogram.loss, metrics
        assert outputs.values is not None, "training a critic needs its values"
        assert batch.values is not None, "training a critic needs old values"
        value = clipped_value_loss(
            outputs.values / self.value_unit,
            batch.values / self.value_unit,
            batch.returns / self.value_unit,
            mask,
            clip_range=self.value_clip_range,
            **averaging,
        )
        metrics = {"value/loss": Metric(value.loss), "value/clip_fraction": Metric(share * value.clip_fraction)}
        return self.value_coef * value.loss, metrics


def _detached(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    return {name: Metric(each.value.detach(), each.reduce) for name, each in metrics.items()}
