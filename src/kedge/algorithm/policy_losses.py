"""Policy losses: PPO's clipped surrogate, the unclipped and KL-penalty surrogates of the same paper, CISPO and masking.

All have the tensors and options of the first; only the settings of the formula differ. In the formulas,
ρ = exp(logprobs − old_logprobs) is the ratio of single tokens, or of whole responses as in GSPO; see `Ratio`.
"""

from __future__ import annotations

from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from typing_extensions import Unpack

from kedge.algorithm.checks import check_positive
from kedge.algorithm.surrogate import PolicyLoss, Surrogate, SurrogateOptions, Tokens
from kedge.errors import ConfigError

__all__ = [
    "cispo_policy_loss",
    "clipped_policy_loss",
    "double_sided_policy_loss",
    "kl_penalty_policy_loss",
    "named_surrogate",
    "unclipped_policy_loss",
]


def named_surrogate(
    name: str,
    *,
    clip_range: float,
    clip_range_high: float | None = None,
    dual_clip: float | None = None,
    kl_coef: float = 0.0,
) -> Surrogate:
    """The policy loss that `policy_loss` in the configuration names, with its settings.

    Args:
        name: `clipped`, `unclipped`, `kl_penalty_fixed`, `kl_penalty_adaptive`, `cispo` or `double_sided`.
        clip_range: ε.
        clip_range_high: ε_high; None for ε.
        dual_clip: Bound of ρ for negative advantages; None for none.
        kl_coef: β of the KL penalty, as it is now.
    """
    high = clip_range if clip_range_high is None else clip_range_high
    surrogates: dict[str, Surrogate] = {
        "clipped": partial(clipped_policy_loss, clip_range=clip_range, clip_range_high=high, dual_clip=dual_clip),
        "unclipped": unclipped_policy_loss,
        "kl_penalty_fixed": partial(kl_penalty_policy_loss, kl_coef=kl_coef),
        "kl_penalty_adaptive": partial(kl_penalty_policy_loss, kl_coef=kl_coef),
        "cispo": partial(cispo_policy_loss, clip_range_high=high),
        "double_sided": partial(double_sided_policy_loss, clip_range=clip_range, clip_range_high=high),
    }
    return surrogates[name]


def clipped_policy_loss(
    logprobs: Float[Tensor, "*batch time"],
    old_logprobs: Float[Tensor, "*batch time"],
    advantages: Float[Tensor, "*batch time"],
    mask: Bool[Tensor, "*batch time"],
    *,
    clip_range: float,
    clip_range_high: float | None = None,
    dual_clip: float | None = None,
    **options: Unpack[SurrogateOptions],
) -> PolicyLoss:
    """PPO's clipped surrogate.

    loss = −aggregate min(ρ·A, clip(ρ, 1−ε, 1+ε_high)·A)

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
        **options: see `SurrogateOptions` and `aggregate`.

    Raises:
        ShapeError: when the shapes differ or nothing counts.
        ConfigError: for a clip range out of bounds.

    Source: PPO eq. 7; dual clip: Ye et al. 2019 (arXiv 1912.09729); clip higher: DAPO eq. 10; spec §6.27.
    """
    low, high = _bounds(clip_range, clip_range_high)
    tokens = Tokens.of(logprobs, old_logprobs, advantages, mask, **options)
    unclipped = -tokens.rho * tokens.advantages
    clipped = -tokens.rho.clamp(low, high) * tokens.advantages
    losses, held_by_dual_clip = torch.maximum(unclipped, clipped), None
    if dual_clip is not None:
        if not dual_clip > 1.0:
            raise ConfigError(f"dual_clip must be above 1, got {dual_clip}")
        bound = -dual_clip * tokens.advantages
        held_by_dual_clip = (tokens.advantages < 0) & (losses > bound)
        losses = torch.where(held_by_dual_clip, bound, losses)
    return tokens.loss(losses, held_by_clip=clipped > unclipped, held_by_dual_clip=held_by_dual_clip)


def unclipped_policy_loss(
    logprobs: Float[Tensor, "*batch time"],
    old_logprobs: Float[Tensor, "*batch time"],
    advantages: Float[Tensor, "*batch time"],
    mask: Bool[Tensor, "*batch time"],
    **options: Unpack[SurrogateOptions],
) -> PolicyLoss:
    """The surrogate without a clip: REINFORCE with importance sampling. An ablation.

    loss = −aggregate ρ·A

    Source: PPO eq. 6 and §6.1; spec §6.27.
    """
    tokens = Tokens.of(logprobs, old_logprobs, advantages, mask, **options)
    return tokens.loss(-tokens.rho * tokens.advantages)


def kl_penalty_policy_loss(
    logprobs: Float[Tensor, "*batch time"],
    old_logprobs: Float[Tensor, "*batch time"],
    advantages: Float[Tensor, "*batch time"],
    mask: Bool[Tensor, "*batch time"],
    *,
    kl_coef: float,
    **options: Unpack[SurrogateOptions],
) -> PolicyLoss:
    """The surrogate with a KL penalty to the old policy instead of the clip; β = `kl_coef` ≥ 0.

    loss = −aggregate (ρ·A − β·KL_t),   KL_t = ρ_t − 1 − log ρ_t of the single tokens, unless `kl` is given

    KL_t is an unbiased estimate of KL(π_old‖π) from the old policy's tokens, in value and in gradient. For the adaptive
    form, pass the KL after the epochs to `adapt_kl_coef_schulman`. This KL keeps the steps small; `kl_loss`, or the KL
    in the rewards, keeps the policy near the reference model.

    Source: PPO eq. 8; spec §6.27.
    """
    tokens = Tokens.of(logprobs, old_logprobs, advantages, mask, **options)
    return tokens.loss(-tokens.rho * tokens.advantages + kl_coef * tokens.kl)


def cispo_policy_loss(
    logprobs: Float[Tensor, "*batch time"],
    old_logprobs: Float[Tensor, "*batch time"],
    advantages: Float[Tensor, "*batch time"],
    mask: Bool[Tensor, "*batch time"],
    *,
    clip_range_high: float,
    **options: Unpack[SurrogateOptions],
) -> PolicyLoss:
    """REINFORCE with capped importance weights (CISPO): no token loses its gradient; ε_high = `clip_range_high` > 0.

    loss = −aggregate sg(min(ρ, 1+ε_high))·A·log π

    The weights have no lower bound. Implementations disagree on what the field means: TRL caps at ε_high itself.

    Source: CISPO (MiniMax-M1, arXiv 2506.13585) eq. 4 and 5; spec §6.27.
    """
    check_positive(clip_range_high=clip_range_high)
    tokens = Tokens.of(logprobs, old_logprobs, advantages, mask, **options)
    rho, cap = tokens.rho.detach(), 1.0 + clip_range_high
    losses = -rho.clamp(max=cap) * tokens.advantages * tokens.logprobs
    return tokens.loss(losses, held_by_clip=(rho > cap) & (tokens.advantages != 0))


def double_sided_policy_loss(
    logprobs: Float[Tensor, "*batch time"],
    old_logprobs: Float[Tensor, "*batch time"],
    advantages: Float[Tensor, "*batch time"],
    mask: Bool[Tensor, "*batch time"],
    *,
    clip_range: float,
    clip_range_high: float | None = None,
    **options: Unpack[SurrogateOptions],
) -> PolicyLoss:
    """The surrogate without the tokens that left the clip range, on either side and for either sign of A.

    loss = −aggregate [1−ε ≤ ρ ≤ 1+ε_high]·ρ·A

    PPO keeps the gradient of a token that moved against its advantage. For stale responses, such a token is more likely
    the result of a mismatch than of the update. Masked tokens stay in the divisor. ε as in `clipped_policy_loss`.

    Source: SAO (arXiv 2607.07508) §3.1; spec §6.27.
    """
    low, high = _bounds(clip_range, clip_range_high)
    tokens = Tokens.of(logprobs, old_logprobs, advantages, mask, **options)
    outside = (tokens.rho < low) | (tokens.rho > high)
    losses = torch.where(outside, 0.0, -tokens.rho * tokens.advantages)
    return tokens.loss(losses, held_by_clip=outside & (tokens.advantages != 0))


def _bounds(clip_range: float, clip_range_high: float | None) -> tuple[float, float]:
    """1 − ε and 1 + ε_high, which is ε unless given."""
    check_positive(clip_range=clip_range)
    if not torch.compiler.is_compiling() and clip_range >= 1.0:
        raise ConfigError(f"clip_range must be below 1, got {clip_range}: 1 − clip_range bounds the ratio")
    if clip_range_high is None:
        clip_range_high = clip_range
    check_positive(clip_range_high=clip_range_high)
    return 1.0 - clip_range, 1.0 + clip_range_high
