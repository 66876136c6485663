"""What all policy losses share: the ratio of the new to the old policy, masking, importance weights, metrics.

Metrics are means over the counted tokens of one call, for every aggregation; weight those of micro-batches by
`num_tokens`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from typing_extensions import Unpack

from kedge.algorithm.checks import check_choice, check_counted
from kedge.algorithm.masking import Averaging, aggregate, keep_counted, masked_mean

__all__ = ["PolicyLoss", "Ratio", "Surrogate", "SurrogateOptions", "Tokens"]

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


class SurrogateOptions(Averaging, total=False):
    """Options of every policy loss, besides those of `aggregate`.

    Attributes:
        ratio: what ρ is, `token` by default; see `Ratio`.
        importance_weights: factor of each token's loss, e.g. from `truncated_importance_weights`.
        kl: KL(π_old‖π) of the distribution at each token, nats; differentiable. None to estimate it from the tokens.
    """

    ratio: Ratio
    importance_weights: Float[Tensor, "*batch time"] | None
    kl: Float[Tensor, "*batch time"] | None


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss and its metrics.

    Attributes:
        loss: the loss to minimize; the only field with a gradient.
        clip_fraction: share of counted tokens where the clip is active: whose clipped loss is strictly larger (PPO; a
            ratio out of range on the side that is not clipped does not count), whose weight is capped (CISPO), or which
            are masked (double-sided). Tokens with advantage 0 do not count. 0 for unclipped losses.
        approx_kl: mean of the KL if it was given, else of ρ − 1 − log ρ, nats: how far the policy has moved since the
            rollout.
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


Surrogate = Callable[..., PolicyLoss]
"""A policy loss with its own settings given, such as `partial(clipped_policy_loss, clip_range=0.2)`.

It is called with the tensors of `clipped_policy_loss` and with `SurrogateOptions`.
"""


@dataclass(frozen=True)
class Tokens:
    """The quantities of the formulas, per token; masked slots are 0, and 1 in ρ with the ratio `token`.

    Attributes:
        logprobs: log π; differentiable.
        log_ratio: log π − log π_old of the single tokens, whatever ρ is; differentiable.
        rho: ρ; differentiable.
        advantages: A.
        mask: True = counts.
        importance_weights: factor of each token's loss.
        averaging: how the losses become one.
        exact_kl: KL(π_old‖π) of the distributions; None where only the tokens' probabilities are known.
    """

    logprobs: Float[Tensor, "*batch time"]
    log_ratio: Float[Tensor, "*batch time"]
    rho: Float[Tensor, "*batch time"]
    advantages: Float[Tensor, "*batch time"]
    mask: Bool[Tensor, "*batch time"]
    importance_weights: Float[Tensor, "*batch time"] | None
    averaging: Averaging
    exact_kl: Float[Tensor, "*batch time"] | None = None

    @classmethod
    def of(
        cls,
        logprobs: Float[Tensor, "*batch time"],
        old_logprobs: Float[Tensor, "*batch time"],
        advantages: Float[Tensor, "*batch time"],
        mask: Bool[Tensor, "*batch time"],
        *,
        ratio: Ratio = "token",
        importance_weights: Float[Tensor, "*batch time"] | None = None,
        kl: Float[Tensor, "*batch time"] | None = None,
        **averaging: Unpack[Averaging],
    ) -> Tokens:
        """The arguments as in `clipped_policy_loss`."""
        check_choice("ratio", ratio, Ratio)
        check_counted(
            mask,
            logprobs=logprobs,
            old_logprobs=old_logprobs,
            advantages=advantages,
            importance_weights=importance_weights,
            kl=kl,
        )
        logprobs = keep_counted(logprobs, mask)
        log_ratio = logprobs - keep_counted(old_logprobs, mask).detach()
        log_ratio = log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
        log_rho = log_ratio if ratio == "token" else _of_sequences(log_ratio, mask)
        advantages = keep_counted(advantages, mask).detach()
        kl = None if kl is None else keep_counted(kl, mask)
        return cls(logprobs, log_ratio, log_rho.exp(), advantages, mask, importance_weights, averaging, kl)

    @property
    def kl(self) -> Float[Tensor, "*batch time"]:
        """KL(π_old‖π): the given one, else ρ − 1 − log ρ of the single tokens, never negative, exact near ρ = 1."""
        return torch.expm1(self.log_ratio) - self.log_ratio if self.exact_kl is None else self.exact_kl

    def loss(
        self, losses: Tensor, *, held_by_clip: Tensor | None = None, held_by_dual_clip: Tensor | None = None
    ) -> PolicyLoss:
        """The policy loss from one loss per token, and from the tokens where a clip is active."""
        mask, ratio = self.mask, self.log_ratio.detach().exp()
        if self.importance_weights is not None:
            losses = losses * keep_counted(self.importance_weights, mask).detach()

        def share(event: Tensor | None) -> Tensor:
            return ratio.new_zeros(()) if event is None else masked_mean(event.to(ratio.dtype), mask)

        return PolicyLoss(
            loss=aggregate(losses, mask, **self.averaging),
            clip_fraction=share(held_by_clip),
            approx_kl=masked_mean(self.kl.detach(), mask),
            dual_clip_fraction=share(held_by_dual_clip),
            ratio_mean=masked_mean(ratio, mask),
            ratio_min=ratio.masked_fill(~mask, math.inf).min(),
            ratio_max=ratio.masked_fill(~mask, 0.0).max(),
            num_tokens=mask.sum(),
        )


def _of_sequences(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """The logarithm of ρ with the ratio `sequence`; see `Ratio`."""
    frozen = log_ratio.detach()
    mean = frozen.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    return log_ratio - frozen + mean
