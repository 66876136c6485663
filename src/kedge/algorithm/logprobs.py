"""Computes log probabilities and entropy of tokens from logits, and compares them with the sampler's."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from kedge.algorithm.masking import check_choice, check_counted, check_positive, in_float64, keep_counted
from kedge_base.errors import ConfigError, ShapeError

BandOf = Literal["token", "sequence"]


def vocabulary_logprobs(
    logits: Float[Tensor, "*shape vocab"], *, temperature: float = 1.0
) -> Float[Tensor, "*shape vocab"]:
    """Log probability of every token of the vocabulary, in nats.

    log softmax(logits / τ)

    Args:
        logits: as in `token_logprobs`.
        temperature: as in `token_logprobs`.

    Raises:
        ConfigError: when the temperature is not above 0.

    Source: spec §1, §4.14.
    """
    if not 0 < temperature < math.inf:
        raise ConfigError(f"temperature must be above 0 and finite, got {temperature}")
    precise = logits if logits.dtype == torch.float64 else logits.float()
    return torch.log_softmax(precise if temperature == 1.0 else precise / temperature, dim=-1)


def token_logprobs(
    logits: Float[Tensor, "*shape vocab"], tokens: Int[Tensor, "*shape"], *, temperature: float = 1.0
) -> Float[Tensor, "*shape"]:
    """Log probability of each token, in nats; differentiable once.

    log softmax(logits / τ)[token]

    Args:
        logits: the outputs at the positions *before* the tokens: `C−1 … C+T−2` for prompt width C and response width T.
            Converted to float32; float64 stays float64.
        tokens: token ids; padding must be valid ids as well.
        temperature: τ > 0, the sampling temperature. The same τ divides the logits of rollout, old, new and reference
            log probabilities.

    Raises:
        ShapeError: when the leading shapes differ.
        ConfigError: when the temperature is not above 0.

    Source: spec §1, §4.14.
    """
    return _evaluated(logits, tokens, temperature)[0]


def token_logprobs_and_entropy(
    logits: Float[Tensor, "*shape vocab"],
    tokens: Int[Tensor, "*shape"],
    *,
    temperature: float = 1.0,
    entropy_gradient: bool = False,
) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
    """Log probability of each token and entropy of its distribution (nats), from one softmax.

    H = −Σ_v p_v·log p_v,   p = softmax(logits / τ)

    Args:
        logits: as in `token_logprobs`; −inf or a very low number masks a token, so that it does not contribute to the
            entropy or its gradient.
        tokens: as in `token_logprobs`.
        temperature: as in `token_logprobs`.
        entropy_gradient: the entropy is differentiable.

    Raises:
        ShapeError: when the leading shapes differ.
        ConfigError: when the temperature is not above 0.

    Source: PPO eq. 9; spec §4.14, §6.29.
    """
    logprobs, distribution, entropy = _evaluated(logits, tokens, temperature, entropy_gradient)
    # Outside `_Evaluated`: activation recomputation stops at its saved tensors and skips this.
    return logprobs, _entropy(distribution) if entropy is None else entropy


def _evaluated(
    logits: Tensor, tokens: Tensor, temperature: float, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Log probabilities; detached log distributions; and the entropies if `entropy_gradient`, else None."""
    found = _Evaluated.apply(logits, tokens.long(), temperature, entropy_gradient)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return cast("tuple[Tensor, Tensor, Tensor | None]", found)


def _entropy(distribution: Tensor) -> Tensor:
    # 0·log 0 = 0, but 0 · −inf is NaN, which nansum skips.
    return -distribution.exp().mul_(distribution).nansum(-1)


class _Evaluated(torch.autograd.Function):
    """Saves only the log-softmax for the backward pass, which works in place.

    ∂ log p_a / ∂ z_v = (1[v = a] − p_v) / τ,    ∂ H / ∂ z_v = −p_v·(log p_v + H) / τ
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, tokens: Tensor, temperature: float, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        if tokens.shape != logits.shape[:-1]:
            raise ShapeError(f"there are tokens {tuple(tokens.shape)} for logits {tuple(logits.shape)}")
        distribution = vocabulary_logprobs(logits, temperature=temperature)
        entropy = _entropy(distribution) if entropy_gradient else None
        ctx.temperature = temperature
        ctx.dtype = logits.dtype
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(distribution, tokens, entropy)
        ctx.mark_non_differentiable(distribution)
        return distribution.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), distribution, entropy

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, logprob_grad: Tensor | None, _: None, entropy_grad: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        distribution, tokens, entropy = ctx.saved_tensors
        # Divided by τ here, while there is one number per token instead of one per token and vocabulary entry.
        direct = distribution.new_zeros(tokens.shape) if logprob_grad is None else logprob_grad / ctx.temperature
        direct = direct.unsqueeze(-1)
        factor = -direct
        if entropy_grad is not None:
            surprise = (distribution + entropy.unsqueeze(-1)).masked_fill_(distribution.isneginf(), 0.0)
            factor = factor - surprise.mul_(entropy_grad.unsqueeze(-1) / ctx.temperature)
        gradient = distribution.exp().mul_(factor).scatter_add_(-1, tokens.unsqueeze(-1), direct)
        return gradient.to(ctx.dtype), None, None, None


def truncated_importance_weights(
    logprobs: Float[Tensor, "*batch time"],
    sampler_logprobs: Float[Tensor, "*batch time"],
    mask: Bool[Tensor, "*batch time"],
    *,
    cap: float,
) -> Float[Tensor, "*batch time"]:
    """Truncated importance weights, for a sampler whose probabilities differ from the trainer's.

    w_t = min(π_trainer(a_t) / π_sampler(a_t), cap);   0 in masked slots

    Args:
        logprobs: the trainer's log probabilities, under the weights used for sampling.
        sampler_logprobs: the sampler's log probabilities.
        mask: True = counts.
        cap: upper bound, > 0: a lower cap has less variance and more bias.

    Returns:
        Weights without gradient, for `importance_weights` of the policy losses.

    Raises:
        ShapeError: when the shapes differ or nothing counts.

    Source: spec §4.17.
    """
    check_counted(mask, logprobs=logprobs, sampler_logprobs=sampler_logprobs)
    check_positive(cap=cap)
    log_ratio = keep_counted(logprobs.detach() - sampler_logprobs.detach(), mask)
    return keep_counted(log_ratio.exp().clamp(max=cap), mask)


def within_ratio_band(
    logprobs: Float[Tensor, "*batch time"],
    sampler_logprobs: Float[Tensor, "*batch time"],
    mask: Bool[Tensor, "*batch time"],
    *,
    of: BandOf,
    low: float,
    high: float,
) -> Bool[Tensor, "*batch time"]:
    """Mask of tokens on which sampler and trainer agree well enough to train on them; tokens outside the band get no
    loss.

    token:     low ≤ w_t ≤ high,             w_t = π_trainer(a_t) / π_sampler(a_t)
    sequence:  low ≤ (Π_t w_t)^(1/n) ≤ high,   for the n tokens of a response together

    Truncation keeps a token that the sampler found unlikely, with a bounded weight; a band removes it, and also a token
    that the trainer finds unlikely. The geometric mean detects a response whose tokens all differ a little.

    Args:
        logprobs: the trainer's log probabilities, under the weights at the start of the update.
        sampler_logprobs: the sampler's log probabilities.
        mask: True = counts.
        of: whether the ratio is per token or per sequence.
        low: lower end of the band, above 0.
        high: upper end, above `low`.

    Returns:
        True for counted tokens inside the band.

    Raises:
        ShapeError: when the shapes differ or nothing counts.
        ConfigError: when the ends are not above 0 and in order.

    Source: token: IcePop, Ring-1T (arXiv 2510.18855), which has 0.5 to 5 and keeps the ratio as the weight inside.
        sequence: the geometric mask of Liu et al., "When Speed Kills Stability" (2025); SkyRL has 0.99 to 1.01.
    """
    check_counted(mask, logprobs=logprobs, sampler_logprobs=sampler_logprobs)
    check_choice("of", of, BandOf)
    check_positive(low=low, high=high)
    if low >= high:
        raise ConfigError(f"the band of ratios must have a lower end below its upper end, got {low} and {high}")
    log_ratio = keep_counted((logprobs - sampler_logprobs).detach(), mask)
    if of == "sequence":
        log_ratio = response_log_ratios(log_ratio, mask).unsqueeze(-1)
    return mask & (log_ratio >= math.log(low)) & (log_ratio <= math.log(high))


def response_log_ratios(
    log_ratio: Float[Tensor, "*batch time"], mask: Bool[Tensor, "*batch time"]
) -> Float[Tensor, "*batch"]:
    """Mean log ratio of each response's tokens, the logarithm of the geometric mean of their ratios; 0 without any."""
    return keep_counted(log_ratio, mask).sum(-1) / mask.sum(-1).clamp(min=1)


@dataclass(frozen=True)
class Mismatch:
    """Distances between the sampler's and the trainer's distributions, over the sampled tokens.

    Attributes:
        k3: Estimate of KL(sampler ‖ trainer), nats per token, ≥ 0.
        largest_ratio: Largest ratio of the two probabilities of a token, in either direction, ≥ 1.
        effective_share: Effective sample size of the tokens under importance weights, as a share of their number.
    """

    k3: float
    largest_ratio: float
    effective_share: float


def sampler_mismatch(
    logprobs: Float[Tensor, "*batch time"],
    sampler_logprobs: Float[Tensor, "*batch time"],
    mask: Bool[Tensor, "*batch time"],
) -> Mismatch:
    """Compare the log probabilities of sampled tokens.

    w_t = π_trainer(a_t) / π_sampler(a_t);   k3 = mean(w − 1 − log w);   share = (Σ w)² / (n · Σ w²)

    Args:
        logprobs: the trainer's log probabilities, under the weights used for sampling.
        sampler_logprobs: the sampler's.
        mask: True = counts.

    Raises:
        ShapeError: when the shapes differ or nothing counts.

    Source: k3: Schulman, "Approximating KL divergence" (2020); effective sample size: Kong (1992).
    """
    check_counted(mask, logprobs=logprobs, sampler_logprobs=sampler_logprobs)
    # Differences near 0 cancel in float32: exp(d) − 1 − d is then below its rounding.
    log_ratio = in_float64((logprobs - sampler_logprobs).detach()[mask])
    k3 = (torch.expm1(log_ratio) - log_ratio).mean()
    # Shifted by the largest value, which cancels in the share, so that no weight overflows.
    weights = (log_ratio - log_ratio.max()).exp()
    share = weights.sum().square() / (weights.square().sum() * len(weights))
    return Mismatch(float(k3), float(log_ratio.abs().max().exp()), float(share))
