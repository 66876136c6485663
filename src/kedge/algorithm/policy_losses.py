"""Policy losses: PPO's clipped surrogate, the unclipped and KL-penalty surrogates of the same paper, CISPO and masking.

Each of them takes the ratio of single tokens, or of whole responses as in GSPO; see `Ratio`.

Metrics are means over the counted tokens of one call, for every aggregation; weight those of micro-batches by
`num_tokens`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kedge.algorithm.checks import check_choice, check_counted, check_positive
from kedge.algorithm.masking import Aggregation, aggregate, keep_counted, masked_mean
from kedge.errors import ConfigError

__all__ = [
    "PolicyLoss",
    "Ratio",
    "cispo_policy_loss",
    "clipped_policy_loss",
    "double_sided_policy_loss",
    "kl_penalty_policy_loss",
    "unclipped_policy_loss",
]

Ratio = Literal["token", "sequence"]
"""What ρ is: each token's own ratio, or the geometric mean of the ratios of all counted tokens of its response.

sequence:  ρ_t = exp(log π_t − sg(log π_t) + sg(1/n·Σ_k (log π_k − log π_old,k)))

The value is the same at all tokens of a response, and the gradient at token t is ρ·∇log π_t. With the aggregation
`sequence` that is the gradient of the clipped mean ratio itself.

Source: GSPO (arXiv 2507.18071) eq. 7 (the ratio), eq. 13 and 14 (the form per token).
"""

# exp(20) is half a billion: a larger ratio only means that something is broken, and an overflow to inf would make the
# gradient NaN even where the clip sets it to 0 (inf · 0).
_MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss and its metrics.

    Attributes:
        loss: the loss to minimize; the only field with a gradient.
        clip_fraction: share of counted tokens where the clip is active: whose clipped loss is strictly larger (PPO; a
            ratio out of range on the side that is not clipped does not count), whose weight is capped (CISPO), or which
            are masked (double-sided). Tokens with advantage 0 do not count. 0 for unclipped losses.
        approx_kl: mean of ρ − 1 − log ρ, nats: how far the policy has moved since the rollout.
        dual_clip_fraction: share of counted tokens where the dual clip is active.
        ratio_mean: mean of the single tokens' ρ, whatever `ratio` is, like `approx_kl`; 1 in expectation.
        ratio_min: smallest of them.
        ratio_max: largest of them.
        num_tokens: counted tokens.
    """

    loss: Float[Tensor, ""]
    clip_fraction: Float[Tensor, ""]
    approx_kl: Float[Tensor, ""]
    dual_clip_fraction: Float[Tensor, ""]
    ratio_mean: Float[Tensor, ""]
    ratio_min: Float[Tensor, ""]
    ratio_max: Float[Tensor, ""]
    num_tokens: Int[Tensor, ""]


def clipped_policy_loss(
    logprobs: Float[Tensor, "*batch time"],
    old_logprobs: Float[Tensor, "*batch time"],
    advantages: Float[Tensor, "*batch time"],
    mask: Bool[Tensor, "*batch time"],
    *,
    clip_range: float,
    clip_range_high: float | None = None,
    dual_clip: float | None = None,
    ratio: Ratio = "token",
    aggregation: Aggregation = "token",
    constant_length: int | None = None,
    normalizer: Tensor | float | None = None,
    importance_weights: Float[Tensor, "*batch time"] | None = None,
) -> PolicyLoss:
    """PPO's clipped surrogate.

    loss = −aggregate min(ρ·A, clip(ρ, 1−ε, 1+ε_high)·A),   ρ = exp(logprobs − old_logprobs)

    The gradient is 0 where A > 0 and ρ > 1+ε_high, or A < 0 and ρ < 1−ε: the token has moved far enough. At ρ = 1, in
    the first minibatch, the gradient is REINFORCE's.

    Args:
        logprobs: of the sampled tokens under the current policy, nats; differentiable.
        old_logprobs: of the same tokens at the start of the epochs; frozen.
        advantages: frozen.
        mask: True = counts.
        clip_range: ε in (0, 1).
        clip_range_high: upper ε if it differs ("clip higher").
        dual_clip: c > 1 limits the loss of tokens with A < 0 to c·|A|, however large ρ is; None for no limit.
        ratio: what ρ is; see `Ratio`.
        aggregation: as in `aggregate`.
        constant_length: as in `aggregate`.
        normalizer: as in `aggregate`: the divisor of the whole minibatch if the rows are one micro-batch of it.
        importance_weights: factor of each token's loss, e.g. from `truncated_importance_weights`.

    Raises:
        ShapeError: when the shapes differ or nothing counts.
        ConfigError: for a clip range out of bounds.

    Source: PPO eq. 7; dual clip: Ye et al. 2019 (arXiv 1912.09729); clip higher: DAPO eq. 10; spec §6.27.
    """
    _check_clip(clip_range, clip_range_high, dual_clip)
    check_counted(mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    log_ratio = _log_ratio(logprobs, old_logprobs, mask)
    advantages = keep_counted(advantages, mask).detach()
    rho = _of_level(log_ratio, mask, ratio).exp()
    high = clip_range if clip_range_high is None else clip_range_high
    unclipped = -rho * advantages
    clipped = -rho.clamp(1.0 - clip_range, 1.0 + high) * advantages
    losses = torch.maximum(unclipped, clipped)
    held_by_dual_clip = None
    if dual_clip is not None:
        bound = -dual_clip * advantages
        held_by_dual_clip = (advantages < 0) & (losses > bound)
        losses = torch.where(held_by_dual_clip, bound, losses)
    loss = aggregate(
        _weighted(losses, importance_weights, mask),
        mask,
        aggregation=aggregation,
        constant_length=constant_length,
        normalizer=normalizer,
    )
    return _policy_loss(loss, log_ratio, mask, held_by_clip=clipped > unclipped, held_by_dual_clip=held_by_dual_clip)


def unclipped_policy_loss(
    logprobs: Float[Tensor, "*batch time"],
    old_logprobs: Float[Tensor, "*batch time"],
    advantages: Float[Tensor, "*batch time"],
    mask: Bool[Tensor, "*batch time"],
    *,
    ratio: Ratio = "token",
    aggregation: Aggregation = "token",
    constant_length: int | None = None,
    normalizer: Tensor | float | None = None,
    importance_weights: Float[Tensor, "*batch time"] | None = None,
) -> PolicyLoss:
    """The surrogate without a clip: REINFORCE with importance sampling. An ablation.

    loss = −aggregate ρ·A,   ρ = exp(logprobs − old_logprobs)

    Args:
        logprobs: as in `clipped_policy_loss`, like the other arguments.
        old_logprobs: frozen.
        advantages: frozen.
        mask: True = counts.
        ratio: what ρ is; see `Ratio`.
        aggregation: as in `aggregate`.
        constant_length: as in `aggregate`.
        normalizer: as in `aggregate`.
        importance_weights: factor of each token's loss.

    Raises:
        ShapeError: when the shapes differ or nothing counts.

    Source: PPO eq. 6 and §6.1; spec §6.27.
    """
    return kl_penalty_policy_loss(
        logprobs,
        old_logprobs,
        advantages,
        mask,
        kl_coef=0.0,
        ratio=ratio,
        aggregation=aggregation,
        constant_length=constant_length,
        normalizer=normalizer,
        importance_weights=importance_weights,
    )


def kl_penalty_policy_loss(
    logprobs: Float[Tensor, "*batch time"],
    old_logprobs: Float[Tensor, "*batch time"],
    advantages: Float[Tensor, "*batch time"],
    mask: Bool[Tensor, "*batch time"],
    *,
    kl_coef: float,
    ratio: Ratio = "token",
    aggregation: Aggregation = "token",
    constant_length: int | None = None,
    normalizer: Tensor | float | None = None,
    importance_weights: Float[Tensor, "*batch time"] | None = None,
) -> PolicyLoss:
    """The surrogate with a KL penalty to the old policy instead of the clip.

    loss = −aggregate (ρ·A − β·KL_t),   KL_t = ρ − 1 − log ρ,   ρ = exp(logprobs − old_logprobs)

    KL_t is an unbiased estimate of KL(π_old‖π) from the old policy's tokens, in value and in gradient. For the adaptive
    form, pass the KL after the epochs to `adapt_kl_coef_schulman`. This KL keeps the steps small; `kl_loss`, or the KL
    in the rewards, keeps the policy near the reference model.

    Args:
        logprobs: as in `clipped_policy_loss`, like the other arguments.
        old_logprobs: frozen.
        advantages: frozen.
        mask: True = counts.
        kl_coef: β ≥ 0, fixed during the epochs.
        ratio: what ρ of the first term is; see `Ratio`. The KL is that of the tokens.
        aggregation: as in `aggregate`.
        constant_length: as in `aggregate`.
        normalizer: as in `aggregate`.
        importance_weights: factor of each token's loss.

    Raises:
        ShapeError: when the shapes differ or nothing counts.

    Source: PPO eq. 8; spec §6.27.
    """
    check_counted(mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    log_ratio = _log_ratio(logprobs, old_logprobs, mask)
    losses = -_of_level(log_ratio, mask, ratio).exp() * keep_counted(advantages, mask).detach()
    if kl_coef:
        losses = losses + kl_coef * _moved(log_ratio)
    loss = aggregate(
        _weighted(losses, importance_weights, mask),
        mask,
        aggregation=aggregation,
        constant_length=constant_length,
        normalizer=normalizer,
    )
    return _policy_loss(loss, log_ratio, mask)


def cispo_policy_loss(
    logprobs: Float[Tensor, "*batch time"],
    old_logprobs: Float[Tensor, "*batch time"],
    advantages: Float[Tensor, "*batch time"],
    mask: Bool[Tensor, "*batch time"],
    *,
    clip_range_high: float,
    ratio: Ratio = "token",
    aggregation: Aggregation = "token",
    constant_length: int | None = None,
    normalizer: Tensor | float | None = None,
    importance_weights: Float[Tensor, "*batch time"] | None = None,
) -> PolicyLoss:
    """REINFORCE with capped importance weights (CISPO): no token loses its gradient.

    loss = −aggregate sg(min(ρ, 1+ε_high))·A·log π,   ρ = exp(logprobs − old_logprobs)

    The weights have no lower bound. Implementations disagree on what the field means: TRL caps at ε_high itself.

    Args:
        logprobs: as in `clipped_policy_loss`, like the other arguments.
        old_logprobs: frozen.
        advantages: frozen.
        mask: True = counts.
        clip_range_high: ε_high > 0.
        ratio: what ρ is; see `Ratio`.
        aggregation: as in `aggregate`.
        constant_length: as in `aggregate`.
        normalizer: as in `aggregate`.
        importance_weights: factor of each token's loss.

    Raises:
        ShapeError: when the shapes differ or nothing counts.
        ConfigError: for a clip range out of bounds.

    Source: CISPO (MiniMax-M1, arXiv 2506.13585) eq. 4 and 5; spec §6.27.
    """
    check_positive(clip_range_high=clip_range_high)
    check_counted(mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    log_ratio = _log_ratio(logprobs, old_logprobs, mask)
    advantages = keep_counted(advantages, mask).detach()
    rho = _of_level(log_ratio, mask, ratio).exp().detach()
    losses = -rho.clamp(max=1.0 + clip_range_high) * advantages * keep_counted(logprobs, mask)
    loss = aggregate(
        _weighted(losses, importance_weights, mask),
        mask,
        aggregation=aggregation,
        constant_length=constant_length,
        normalizer=normalizer,
    )
    return _policy_loss(loss, log_ratio, mask, held_by_clip=(rho > 1.0 + clip_range_high) & (advantages != 0))


def double_sided_policy_loss(
    logprobs: Float[Tensor, "*batch time"],
    old_logprobs: Float[Tensor, "*batch time"],
    advantages: Float[Tensor, "*batch time"],
    mask: Bool[Tensor, "*batch time"],
    *,
    clip_range: float,
    clip_range_high: float | None = None,
    ratio: Ratio = "token",
    aggregation: Aggregation = "token",
    constant_length: int | None = None,
    normalizer: Tensor | float | None = None,
    importance_weights: Float[Tensor, "*batch time"] | None = None,
) -> PolicyLoss:
    """The surrogate without the tokens that left the clip range, on either side and for either sign of A.

    loss = −aggregate [1−ε ≤ ρ ≤ 1+ε_high]·ρ·A,   ρ = exp(logprobs − old_logprobs)

    PPO keeps the gradient of a token that moved against its advantage. For stale responses, such a token is more likely
    the result of a mismatch than of the update. Masked tokens stay in the divisor.

    Args:
        logprobs: as in `clipped_policy_loss`, like the other arguments.
        old_logprobs: frozen.
        advantages: frozen.
        mask: True = counts.
        clip_range: ε in (0, 1).
        clip_range_high: upper ε if it differs.
        ratio: what ρ is; see `Ratio`.
        aggregation: as in `aggregate`.
        constant_length: as in `aggregate`.
        normalizer: as in `aggregate`.
        importance_weights: factor of each token's loss.

    Raises:
        ShapeError: when the shapes differ or nothing counts.
        ConfigError: for a clip range out of bounds.

    Source: SAO (arXiv 2607.07508) §3.1; spec §6.27.
    """
    _check_clip(clip_range, clip_range_high, None)
    check_counted(mask, logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages)
    log_ratio = _log_ratio(logprobs, old_logprobs, mask)
    advantages = keep_counted(advantages, mask).detach()
    high = clip_range if clip_range_high is None else clip_range_high
    rho = _of_level(log_ratio, mask, ratio).exp()
    outside = (rho < 1.0 - clip_range) | (rho > 1.0 + high)
    loss = aggregate(
        _weighted(torch.where(outside, 0.0, -rho * advantages), importance_weights, mask),
        mask,
        aggregation=aggregation,
        constant_length=constant_length,
        normalizer=normalizer,
    )
    return _policy_loss(loss, log_ratio, mask, held_by_clip=outside & (advantages != 0))


def _log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    log_ratio = keep_counted(logprobs, mask) - keep_counted(old_logprobs, mask).detach()
    return log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)


def _of_level(log_ratio: Tensor, mask: Tensor, ratio: Ratio) -> Tensor:
    """The logarithm of ρ; see `Ratio`."""
    check_choice("ratio", ratio, Ratio)
    if ratio == "token":
        return log_ratio
    frozen = log_ratio.detach()
    mean = frozen.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    return log_ratio - frozen + mean


def _moved(log_ratio: Tensor) -> Tensor:
    """ρ − 1 − log ρ: KL(π_old‖π) per token, never negative, exact near ρ = 1."""
    return torch.expm1(log_ratio) - log_ratio


def _weighted(losses: Tensor, importance_weights: Tensor | None, mask: Tensor) -> Tensor:
    if importance_weights is None:
        return losses
    check_counted(mask, importance_weights=importance_weights)
    return losses * keep_counted(importance_weights, mask).detach()


def _policy_loss(
    loss: Tensor,
    log_ratio: Tensor,
    mask: Tensor,
    *,
    held_by_clip: Tensor | None = None,
    held_by_dual_clip: Tensor | None = None,
) -> PolicyLoss:
    log_ratio = log_ratio.detach()
    ratio = log_ratio.exp()

    def share(event: Tensor | None) -> Tensor:
        return ratio.new_zeros(()) if event is None else masked_mean(event.to(ratio.dtype), mask)

    return PolicyLoss(
        loss=loss,
        clip_fraction=share(held_by_clip),
        approx_kl=masked_mean(_moved(log_ratio), mask),
        dual_clip_fraction=share(held_by_dual_clip),
        ratio_mean=masked_mean(ratio, mask),
        ratio_min=ratio.masked_fill(~mask, math.inf).min(),
        ratio_max=ratio.masked_fill(~mask, 0.0).max(),
        num_tokens=mask.sum(),
    )


def _check_clip(clip_range: float, clip_range_high: float | None, dual_clip: float | None) -> None:
    check_positive(clip_range=clip_range)
    if clip_range >= 1.0:
        raise ConfigError(f"clip_range must be below 1, got {clip_range}: 1 − clip_range bounds the ratio")
    if clip_range_high is not None:
        check_positive(clip_range_high=clip_range_high)
    if dual_clip is not None and not dual_clip > 1.0:
        raise ConfigError(f"dual_clip must be above 1, got {dual_clip}")
