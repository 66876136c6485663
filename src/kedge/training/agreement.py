"""How far a reward model agrees with people: accuracy, the length-only baseline, calibration."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["Agreement", "CalibrationBin", "measure_agreement", "verdicts"]


@dataclass(frozen=True)
class CalibrationBin:
    """The pairs about which the model was about as sure.

    Attributes:
        predicted: Mean of σ(|Δ|) over the pairs: how sure the model is that the one it prefers is the better one.
        observed: Share of them in which people agreed.
        num_pairs: How many they are.
    """

    predicted: float
    observed: float
    num_pairs: int


@dataclass(frozen=True)
class Agreement:
    """Figures over pairs whose better response is known.

    Attributes:
        num_pairs: Pairs measured.
        accuracy: Share in which the better response has the higher score; a tie is half right.
        length_accuracy: The same for a judge who takes the longer response: what a model is worth that learnt no more.
        calibration_error: Expected calibration error, mean of |predicted − observed| over the bins by their pairs.
        bins: From unsure to sure; empty ones are left out.
    """

    num_pairs: int
    accuracy: float
    length_accuracy: float
    calibration_error: float
    bins: tuple[CalibrationBin, ...]


def measure_agreement(
    leads: Float[Tensor, " pairs"], length_leads: Float[Tensor, " pairs"], *, num_bins: int = 10
) -> Agreement:
    """Compare a reward model's verdicts with people's.

    Under the Bradley–Terry model that it was fitted with, a lead of Δ says that the response is better with probability
    σ(Δ). The bins divide [½, 1] evenly, the range of the side that the model takes.

    Args:
        leads: Score of the better response less that of the worse, Δ.
        length_leads: The same for their lengths, in whatever unit.
        num_bins: Bins of the calibration, ≥ 1.

    Source: spec §3, §11; Guo et al. 2017 (the calibration error).
    """
    sure = torch.sigmoid(leads.double().abs())
    right = verdicts(leads)
    index = ((sure - 0.5) * 2 * num_bins).long().clamp(max=num_bins - 1)
    bins = tuple(_bin(sure[index == number], right[index == number]) for number in index.unique().tolist())
    gap = sum(abs(part.predicted - part.observed) * part.num_pairs for part in bins)
    return Agreement(
        num_pairs=len(leads),
        accuracy=float(right.mean()),
        length_accuracy=float(verdicts(length_leads).mean()),
        calibration_error=gap / len(leads),
        bins=bins,
    )


def verdicts(leads: Float[Tensor, "*pairs"]) -> Float[Tensor, "*pairs"]:
    """1 where the better response leads, 0 where it trails, ½ where the two are equal."""
    return (leads > 0).float() + 0.5 * (leads == 0).float()


def _bin(sure: Tensor, right: Tensor) -> CalibrationBin:
    return CalibrationBin(float(sure.mean()), float(right.mean()), len(sure))
