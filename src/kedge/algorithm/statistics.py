"""Statistics of held-out results: win rates, and a reward model's calibration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kedge.errors import ShapeError
from kedge.system.intervals import Interval, share_interval

__all__ = ["Calibration", "calibration", "win_rate", "wins"]


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
    scores: Sequence[float] | Tensor, others: Sequence[float] | Tensor, *, confidence: float = 0.95
) -> Interval:
    """Share of pairs won by the first scores, ties counting half, with the interval of `share_interval`."""
    return share_interval([float(each) for each in wins(scores, others)], confidence=confidence)


def calibration(margins: Sequence[float] | Tensor, *, num_bins: int = 10) -> Calibration:
    """Compare a reward model's confidence in its preferences with how often they are right.

    confidence = σ(|margin|),   right if margin > 0 (half if it is 0),   in equal bins of [½, 1]

    Args:
        margins: Score of the chosen response minus the rejected one's, one per pair.
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
    confidence = torch.sigmoid(data.abs())
    right = (1 + torch.sign(data)) / 2
    bins = ((confidence - 0.5) * 2 * num_bins).long().clamp(max=num_bins - 1)
    counts = torch.bincount(bins, minlength=num_bins)
    filled = counts > 0
    mean_confidence = torch.bincount(bins, weights=confidence, minlength=num_bins)[filled] / counts[filled]
    mean_accuracy = torch.bincount(bins, weights=right, minlength=num_bins)[filled] / counts[filled]
    gaps = (mean_accuracy - mean_confidence).abs() * counts[filled]
    return Calibration(mean_confidence, mean_accuracy, counts[filled], float(gaps.sum() / data.numel()))
