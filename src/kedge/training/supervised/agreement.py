"""How far a reward model agrees with people: accuracy, beside that of a mere sense of length, and calibration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kedge.algorithm.statistics import Calibration, Interval, bootstrap_interval, calibration
from kedge.models import ScalarModel, score_rows
from kedge.training.supervised.losses import RankedResponses, RunPrecision

__all__ = ["Agreement", "measure_agreement", "pair_leads"]

NUM_QUANTILES = 21
"""Those at 0, 5, …, 100 %."""


@dataclass(frozen=True)
class Agreement:
    """Figures on prompts that the model was not trained on.

    Attributes:
        accuracy: Share of a prompt's pairs in the right order, ties half, mean over prompts.
        length_accuracy: The same for a judge who takes the longer response: what a model is worth that learnt no more.
        calibration: Whether it is right as often as it believes, over all pairs.
        chosen: Score of the better response of each pair.
        rejected: That of the worse.
    """

    accuracy: Interval
    length_accuracy: Interval
    calibration: Calibration
    chosen: list[float]
    rejected: list[float]

    @property
    def leads(self) -> list[float]:
        """By how much the better response leads, one per pair."""
        return [better - worse for better, worse in zip(self.chosen, self.rejected, strict=True)]

    def summary(self) -> dict[str, Any]:
        """The figures as JSON holds them."""
        bins = zip(
            self.calibration.confidence.tolist(),
            self.calibration.accuracy.tolist(),
            self.calibration.counts.tolist(),
            strict=True,
        )
        return {
            "accuracy": vars(self.accuracy),
            "length_accuracy": vars(self.length_accuracy),
            "num_pairs": len(self.chosen),
            "calibration_error": self.calibration.error,
            "calibration_bins": [
                {"confidence": confidence, "accuracy": accuracy, "num_pairs": count}
                for confidence, accuracy, count in bins
            ],
            "chosen_scores": _quantiles(self.chosen),
            "rejected_scores": _quantiles(self.rejected),
        }


def measure_agreement(
    model: ScalarModel,
    examples: Sequence[RankedResponses],
    *,
    precision: RunPrecision = "fp32",
    micro_batch_tokens: int | None = None,
) -> Agreement:
    """Let a reward model judge responses whose order is known.

    Args:
        model: The judge, with the scale of scores that it was fitted with.
        examples: Prompts with ranked responses, at least one.
        precision: Number format of the matrix products.
        micro_batch_tokens: Tokens per forward pass; None reads all at once.

    Source: spec §3, §11.
    """
    rows = [row for example in examples for row in example.rows]
    scores = score_rows(model, rows, precision=precision, micro_batch_tokens=micro_batch_tokens)
    parts = scores.split([len(example.rows) for example in examples])
    pairs = [pair_figures(part, example.ranks) for part, example in zip(parts, examples, strict=True)]
    by_score = [better - worse for better, worse in pairs]
    by_length = [pair_leads(torch.tensor(example.lengths).float(), example.ranks) for example in examples]
    return Agreement(
        _accuracy(by_score),
        _accuracy(by_length),
        calibration(torch.cat(by_score)),
        chosen=torch.cat([better for better, _ in pairs]).tolist(),
        rejected=torch.cat([worse for _, worse in pairs]).tolist(),
    )


def pair_figures(figures: Tensor, ranks: Sequence[float]) -> tuple[Tensor, Tensor]:
    """The better and the worse response's figure, for each pair of one prompt's responses that is not a tie."""
    pairs = [(i, j) for i, better in enumerate(ranks) for j, worse in enumerate(ranks) if better < worse]
    better, worse = torch.tensor(pairs, dtype=torch.long).reshape(-1, 2).unbind(dim=1)
    return figures[better], figures[worse]


def pair_leads(figures: Tensor, ranks: Sequence[float]) -> Tensor:
    """By how much the better response's figure leads, for each such pair."""
    better, worse = pair_figures(figures, ranks)
    return better - worse


def _quantiles(scores: Sequence[float]) -> list[float]:
    """Evenly spaced, from the smallest to the largest; none of nothing."""
    figures = torch.tensor(scores, dtype=torch.float64)
    at = torch.linspace(0, 1, NUM_QUANTILES, dtype=torch.float64)
    return torch.quantile(figures, at).tolist() if scores else []


def _accuracy(leads: Sequence[Tensor]) -> Interval:
    # The pairs of one prompt are not independent: the prompts are.
    return bootstrap_interval([float((1 + torch.sign(prompt)).mean() / 2) for prompt in leads])
