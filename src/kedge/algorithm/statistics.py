"""Statistics of held-out results: win rates, pass@k and maj@k, and a reward model's calibration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import comb

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kedge_base.errors import ShapeError
from kedge_base.intervals import Interval, share_interval


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


def win_rate(scores: Sequence[float] | Tensor, others: Sequence[float] | Tensor) -> Interval:
    """Share of pairs won by the first scores, ties counting half, with the interval of `share_interval`."""
    return share_interval([float(each) for each in wins(scores, others)])


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Unbiased estimate of the probability that at least one of k responses to a prompt is correct.

    1 − C(n − c, k) / C(n, k):   the share of the k-subsets that contain a right response

    Args:
        num_samples: n, the number of responses to the prompt.
        num_right: c, how many of them are correct.
        k: Number of responses drawn, 1 ≤ k ≤ n.

    Raises:
        ShapeError: k or c is out of range.

    Source: Chen et al. 2021 (arXiv 2107.03374), eq. 1. 1 − (1 − c/n)^k would be biased low.
    """
    _check_draw(num_samples, num_right, k)
    return 1 - comb(num_samples - num_right, k) / comb(num_samples, k)


def majority_at_k(num_right: int, wrong: Sequence[int], num_silent: int, k: int) -> float:
    """Probability that the most frequent answer of k of the responses to a prompt is the right one, without bias.

    The share of the k-subsets in which the right answer is the most frequent, ties broken at random. Subsets are
    counted by their number of right responses, with at most as many of each wrong answer. Responses without an answer
    do not vote.

    Args:
        num_right: Responses with the right answer.
        wrong: Responses with each wrong answer.
        num_silent: Responses without an answer.
        k: Responses that vote, from 1 to their number.

    Raises:
        ShapeError: k is out of range.

    Source: Wang et al. 2022 (arXiv 2203.11171), self-consistency.
    """
    total = num_right + sum(wrong) + num_silent
    _check_draw(total, num_right, k)
    share = Fraction(0)
    for right in range(1, min(num_right, k) + 1):
        ways = Counter({(k - right, 1): comb(num_right, right)})  # by (places left, answers tied for first)
        for count in wrong:
            more = Counter[tuple[int, int]]()
            for (places, tied), number in ways.items():
                for drawn in range(min(count, right, places) + 1):
                    more[places - drawn, tied + (drawn == right)] += number * comb(count, drawn)
            ways = more
        share += sum(Fraction(number * comb(num_silent, places), tied) for (places, tied), number in ways.items())
    return float(share / comb(total, k))


def _check_draw(num_samples: int, num_right: int, k: int) -> None:
    if not 1 <= k <= num_samples or not 0 <= num_right <= num_samples:
        raise ShapeError(f"{k} of {num_samples} responses cannot be drawn, or {num_right} of them cannot be right")


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
