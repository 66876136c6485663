"""The critic's loss and its explained variance."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from typing_extensions import Unpack

from kedge.algorithm.masking import (
    Averaging,
    aggregate,
    check_counted,
    check_positive,
    counted,
    keep_counted,
    masked_mean,
    rounding_of,
)
from kedge_base.errors import ConfigError

MIN_SPREAD = 1e-4
"""Returns with a standard deviation below this share of their root mean square are treated as constant, because
rounding then affects their differences.
"""


class ValueLoss(NamedTuple):
    """A value loss, and the share of counted tokens with a strictly larger clipped error."""

    loss: Float[Tensor, ""]
    clip_fraction: Float[Tensor, ""]


def clipped_value_loss(
    values: Float[Tensor, "*batch time"],
    old_values: Float[Tensor, "*batch time"],
    returns: Float[Tensor, "*batch time"],
    mask: Bool[Tensor, "*batch time"],
    *,
    clip_range: float | None,
    **averaging: Unpack[Averaging],
) -> ValueLoss:
    """Squared error of the critic: the larger of the unclipped error and the error with V at most ε from V_old.

    loss = ½·aggregate max((V − R)², (clip(V, V_old − ε, V_old + ε) − R)²)

    The ½ is included; the coefficient of this loss in the total loss is not.

    Args:
        values: V of the current critic; differentiable.
        old_values: V_old, at the start of the epochs; frozen.
        returns: R, from unwhitened advantages; frozen.
        mask: True = counts; the reward mask, which can have one more slot than the action mask.
        clip_range: ε > 0 in the unit of the values, so it must fit their scale; None for the unclipped error.
        **averaging: see `aggregate`.

    Raises:
        ShapeError: when the shapes differ or nothing counts.
        ConfigError: for a clip range that is not above 0.

    Source: S0; N+; spec §6.28.
    """
    values, old_values, returns = counted(mask, values=values, old_values=old_values.detach(), returns=returns.detach())
    losses = free = (values - returns).square()
    if clip_range is not None:
        check_positive(value_clip_range=clip_range)
        held = values.clamp(old_values - clip_range, old_values + clip_range)
        losses = torch.maximum(free, (held - returns).square())
    loss = 0.5 * aggregate(losses, mask, **averaging)
    clipped = (losses > free) & mask
    return ValueLoss(loss=loss, clip_fraction=clipped.to(losses.dtype).sum() / mask.sum())


def spread_of_returns(returns: Float[Tensor, " slots"]) -> float:
    """The standard deviation of returns, at least `MIN_SPREAD` of their root mean square; 0 if all are 0."""
    size = float(returns.square().mean().sqrt())
    return max(float(returns.std(correction=0)), MIN_SPREAD * size)


@torch.no_grad()
def explained_variance(
    values: Float[Tensor, "*shape"], returns: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]
) -> Float[Tensor, ""]:
    """Share of the returns' variance that the critic explains.

    1 − Var(R − V) / Var(R): 1 is a perfect critic, 0 is as good as a constant, below 0 is worse than a constant.

    Args:
        values: V.
        returns: R.
        mask: True = counts.

    Returns:
        The share; 0 if the returns are constant up to rounding.

    Raises:
        ShapeError: when the shapes differ or nothing counts.

    Source: spec §10.
    """
    check_counted(mask, values=values, returns=returns)
    spread = _variance(returns, mask)
    unexplained = _variance(returns - values, mask)
    # Returns are sums of values and advantages, so they are rounded as values are.
    terms = torch.maximum(returns.abs(), values.abs())
    rounding = rounding_of(torch.where(mask, terms, 0.0).max(), returns.dtype)
    return torch.where(spread > rounding.square(), 1.0 - unexplained / spread, 0.0)


def _variance(x: Tensor, mask: Tensor) -> Tensor:
    count = mask.sum()
    centered = x - torch.where(mask, x, 0.0).sum() / count
    return torch.where(mask, centered.square(), 0.0).sum() / count


SIGMA_PER_WIDTH = 0.75
"""Standard deviation of a target, in bin widths: its mass covers about six bins, independently of their number."""


@dataclass(frozen=True)
class Bins:
    """Bins of equal width that cover the support of the returns.

    Args:
        low: Lower end of the support, in units of the return.
        high: Upper end.
        num_bins: Number of bins.

    Raises:
        ConfigError: The support is empty, or has fewer than two bins.
    """

    low: float
    high: float
    num_bins: int

    def __post_init__(self) -> None:
        if not (self.low < self.high and self.num_bins >= 2):
            raise ConfigError(f"{self.num_bins} bins from {self.low:g} to {self.high:g}: need low < high and 2 bins")

    @property
    def width(self) -> float:
        """Width of a bin, in units of the return."""
        return (self.high - self.low) / self.num_bins

    def edges(self, like: Tensor) -> Float[Tensor, " edges"]:
        """The edges of the bins, one more than bins; dtype and device of `like`."""
        return torch.linspace(self.low, self.high, self.num_bins + 1, dtype=like.dtype, device=like.device)

    def centers(self, like: Tensor) -> Float[Tensor, " bins"]:
        """The centers of the bins; dtype and device of `like`."""
        edges = self.edges(like)
        return (edges[:-1] + edges[1:]) / 2

    def expectation(self, logits: Float[Tensor, "*rest bins"]) -> Float[Tensor, "*rest"]:
        """The value: V = Σ_i softmax(logits)_i · center_i.

        Source: Farebrother et al. (2403.03950) §3.
        """
        return logits.softmax(-1) @ self.centers(logits)

    def target(self, returns: Float[Tensor, "*rest"]) -> Float[Tensor, "*rest bins"]:
        """The probability of each bin under a Gaussian around the return, truncated at the ends of the support.

        p_i = (Φ((e_{i+1} − R)/σ) − Φ((e_i − R)/σ)) / (Φ((e_n − R)/σ) − Φ((e_0 − R)/σ)),   σ = 0.75 bin widths

        A return outside the support is clamped to it: beyond a few σ, all of the differences would be 0. Truncation
        moves the expectation inward by 0.69 bin widths at an end of the support and by 0.15 one bin from it.

        Source: Imani & White (1806.04613); Farebrother et al. (2403.03950) §3.1, appendix A.
        """
        distances = self.edges(returns) - returns.clamp(self.low, self.high).unsqueeze(-1)
        below = 0.5 * torch.erf(distances / (math.sqrt(2) * SIGMA_PER_WIDTH * self.width))
        return below.diff(dim=-1) / (below[..., -1:] - below[..., :1])


class HistogramLoss(NamedTuple):
    """A cross-entropy, and the share of counted returns that lie outside the support."""

    loss: Float[Tensor, ""]
    outside: Float[Tensor, ""]


def histogram_value_loss(
    logits: Float[Tensor, "*batch time bins"],
    returns: Float[Tensor, "*batch time"],
    mask: Bool[Tensor, "*batch time"],
    *,
    bins: Bins,
    **averaging: Unpack[Averaging],
) -> HistogramLoss:
    """Cross-entropy of the critic's histogram with a Gaussian around the return (HL-Gauss).

    loss = aggregate −Σ_i p_i(R)·log softmax(logits)_i

    In nats, independently of the unit of the returns. Its minimum is the entropy of a target, 1.20 nats, not 0.

    Args:
        logits: One per bin; differentiable.
        returns: R, from unwhitened advantages; frozen.
        mask: True = counts.
        bins: The support.
        **averaging: see `aggregate`.

    Raises:
        ShapeError: when the shapes differ or nothing counts.

    Source: Farebrother et al. (2403.03950) §3.1.
    """
    check_counted(mask, returns=returns, logits=logits[..., 0])
    returns = keep_counted(returns, mask).detach()
    log_probs = torch.where(mask.unsqueeze(-1), logits, 0.0).log_softmax(-1)
    losses = -(bins.target(returns) * log_probs).sum(-1)
    loss = aggregate(losses, mask, **averaging)
    outside = (returns < bins.low) | (returns > bins.high)
    return HistogramLoss(loss, masked_mean(outside.to(losses.dtype), mask))
