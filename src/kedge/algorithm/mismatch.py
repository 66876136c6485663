"""How far the sampler's probabilities are from the trainer's, under the same weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kedge.algorithm.checks import check_counted
from kedge.algorithm.masking import keep_counted

__all__ = ["Mismatch", "sampler_mismatch"]


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
    log_ratio = keep_counted((logprobs - sampler_logprobs).detach(), mask)[mask].double()
    k3 = (torch.expm1(log_ratio) - log_ratio).mean()
    # Shifted by the largest, which cancels in the share, so that no weight overflows.
    weights = (log_ratio - log_ratio.max()).exp()
    share = weights.sum().square() / (weights.square().sum() * len(weights))
    return Mismatch(float(k3), float(log_ratio.abs().max().exp()), float(share))
