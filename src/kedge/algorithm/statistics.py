"""Statistics of held-out results: win rates, bootstrap intervals, and a reward model's calibration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kedge.errors import ShapeError

__all__ = ["Calibration", "Interval", "bootstrap_interval", "calibration", "share_interval", "win_rate", "wins"]

_CHUNK = 1 << 22
"""Draws per chunk, so that memory does not grow with resamples × values."""


@dataclass(frozen=True)
class Interval:
    """A mean with its confidence interval.

    Attributes:
        value: the mean.
        low: lower end of the confidence interval.
        high: upper end.
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        """`0.71 (0.66–0.76)`."""
        return f"{self.value:.2f} ({self.low:.2f}–{self.high:.2f})"


@dataclass(frozen=True)
class Calibration:
    """How well a preference model's confidence matches its accuracy.

    Attributes:
        confidence: mean probability of the model's preferred response, per non-empty bin, in [½, 1].
        accuracy: share of the bin's pairs where the annotator has the same preference.
        counts: pairs per bin.
        error: the expected calibration error, Σ_bins share of pairs · |accuracy − confidence|, in [0, ½].
    """

    confidence: Float[Tensor, " bins"]
    accuracy: Float[Tensor, " bins"]
    counts: Int[Tensor, " bins"]
    error: float


def bootstrap_interval(
    values: Sequence[float] | Tensor, *, confidence: float = 0.95, num_resamples: int = 2_000, seed: int = 0
) -> Interval:
    """The mean of independent values, with a percentile bootstrap interval.

    low, high = the (1 ∓ confidence)/2 quantiles of the means of resamples, drawn with replacement

    Args:
        values: One number per independent unit (a prompt, a post); at least one.
        confidence: Coverage: the share of repetitions whose interval contains the true mean, in (0, 1).
        num_resamples: Number of resamples, ≥ 1.
        seed: Of the draws; the same seed gives the same interval.

    Raises:
        ShapeError: No values, non-finite values, more than one axis, or an argument out of range.

    Source: Efron and Tibshirani 1993, chapter 13.
    """
    data = torch.as_tensor(values, dtype=torch.float64, device="cpu")
    if data.ndim != 1 or data.numel() == 0 or not data.isfinite().all():
        raise ShapeError(f"a bootstrap interval needs a non-empty list of finite values, got shape {list(data.shape)}")
    if not 0 < confidence < 1 or num_resamples < 1:
        raise ShapeError(f"confidence {confidence} must be in (0, 1) and num_resamples {num_resamples} at least 1")
    generator = torch.Generator().manual_seed(seed)
    rows = max(1, _CHUNK // data.numel())
    sizes = [min(rows, num_resamples - start) for start in range(0, num_resamples, rows)]
    draws = (torch.randint(data.numel(), (size, data.numel()), generator=generator) for size in sizes)
    means = torch.cat([data[indices].mean(-1) for indices in draws])
    tail = (1 - confidence) / 2
    return Interval(float(data.mean()), float(means.quantile(tail)), float(means.quantile(1 - tail)))


def share_interval(
    values: Sequence[float] | Tensor, *, confidence: float = 0.95, num_resamples: int = 2_000, seed: int = 0
) -> Interval:
    """The mean of independent shares in [0, 1], with its interval.

    The bootstrap's interval; if all n values are 0, or all are 1, where resamples do not differ, the exact one of
    Clopper and Pearson:   0 to 1 − α^(1/n),   or   α^(1/n) to 1,   with α = (1 − confidence)/2

    Args, errors: As in `bootstrap_interval`.

    Source: Clopper and Pearson 1934.
    """
    interval = bootstrap_interval(values, confidence=confidence, num_resamples=num_resamples, seed=seed)
    reach = ((1 - confidence) / 2) ** (1 / len(values))
    if interval.value == 0:
        return Interval(0.0, 0.0, 1 - reach)
    if interval.value == 1:
        return Interval(1.0, reach, 1.0)
    return interval


def wins(scores: Sequence[float] | Tensor, others: Sequence[float] | Tensor) -> Float[Tensor, " pairs"]:
    """Per pair: 1 if the first score is higher, 0 if it is lower, ½ for a tie.

    Raises:
        ShapeError: The two differ in shape.
    """
    ours = torch.as_tensor(scores, dtype=torch.float64, device="cpu")
    theirs = torch.as_tensor(others, dtype=torch.float64, device="cpu")
    if ours.shape != theirs.shape:
        raise ShapeError(f"scores have shape {list(ours.shape)} and others {list(theirs.shape)}; expected equal shapes")
    return (1 + torch.sign(ours - theirs)) / 2


def win_rate(
    scores: Sequence[float] | Tensor,
    others: Sequence[float] | Tensor,
    *,
    confidence: float = 0.95,
    num_resamples: int = 2_000,
    seed: int = 0,
) -> Interval:
    """Share of pairs won by the first scores, ties counting half, with the interval of `share_interval`."""
    return share_interval(wins(scores, others), confidence=confidence, num_resamples=num_resamples, seed=seed)


def calibration(margins: Sequence[float] | Tensor, *, num_bins: int = 10) -> Calibration:
    """Compare a reward model's confidence in its preferences with how often they are right.

    confidence = σ(|margin|),   right if margin > 0 (half if it is 0),   in equal bins of [½, 1]

    Args:
        margins: Score of the chosen response minus that of the rejected one, one per pair.
        num_bins: Bins between ½ and 1, ≥ 1.

    Raises:
        ShapeError: No margins, more than one axis, or no bins.

    Source: Guo et al. 2017 (arXiv 1706.04599), eq. 5, for the two-class Bradley–Terry model of spec §3.9.
    """
    data = torch.as_tensor(margins, dtype=torch.float64, device="cpu")
    if data.ndim != 1 or data.numel() == 0 or num_bins < 1:
        raise ShapeError(
            f"calibration needs a list of margins and at least 1 bin, got shape {list(data.shape)} and {num_bins} bins"
        )
    confidence, right = torch.sigmoid(data.abs()), (1 + torch.sign(data)) / 2
    bins = ((confidence - 0.5) * 2 * num_bins).long().clamp(max=num_bins - 1)
    counts = torch.bincount(bins, minlength=num_bins)
    filled = counts > 0
    mean_confidence = torch.bincount(bins, weights=confidence, minlength=num_bins)[filled] / counts[filled]
    mean_accuracy = torch.bincount(bins, weights=right, minlength=num_bins)[filled] / counts[filled]
    gaps = (mean_accuracy - mean_confidence).abs() * counts[filled]
    return Calibration(mean_confidence, mean_accuracy, counts[filled], float(gaps.sum() / data.numel()))
