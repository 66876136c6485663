"""Agreement of a reward model with ranked data: accuracy, a length baseline, and calibration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kedge.algorithm.statistics import Calibration, calibration
from kedge.models import Precision, ScalarModel, score_rows
from kedge.system.intervals import Interval, share_interval
from kedge.system.memory import in_phase
from kedge.system.ranks import ALONE, PassTokens, Ranks
from kedge.training.supervised.losses import RankedResponses

NUM_QUANTILES = 21
"""Quantiles at 0, 5, …, 100 %."""


@dataclass(frozen=True)
class Agreement:
    """Metrics on held-out prompts.

    Attributes:
        accuracy: Share of a prompt's pairs ordered correctly, ties count half; mean over prompts.
        length_accuracy: The same for a baseline that prefers the longer response.
        calibration: Predicted against actual accuracy, over all pairs.
        chosen: Score of the better response of each pair.
        rejected: Score of the worse response of each pair.
    """

    accuracy: Interval
    length_accuracy: Interval
    calibration: Calibration
    chosen: list[float]
    rejected: list[float]

    def summary(self) -> dict[str, Any]:
        """The metrics as JSON values."""
        found = self.calibration
        bins = zip(*(each.tolist() for each in (found.confidence, found.accuracy, found.counts)), strict=True)
        return {
            "accuracy": self.accuracy.as_json(),
            "length_accuracy": self.length_accuracy.as_json(),
            "num_pairs": len(self.chosen),
            "calibration_error": self.calibration.error,
            "calibration_bins": [
                {"confidence": confidence, "accuracy": accuracy, "num_pairs": count}
                for confidence, accuracy, count in bins
            ],
            "chosen_scores": _quantiles(self.chosen),
            "rejected_scores": _quantiles(self.rejected),
        }


@in_phase("evaluation")
def measure_agreement(
    model: ScalarModel,
    examples: Sequence[RankedResponses],
    *,
    precision: Precision = "fp32",
    micro_batch_tokens: PassTokens = None,
    ranks: Ranks = ALONE,
) -> Agreement:
    """Measure a reward model on responses with a known order.

    Args:
        model: The reward model, before `normalize_scale`, which would change the calibration.
        examples: Prompts with ranked responses, at least one.
        precision: Number format of the matrix products.
        micro_batch_tokens: Tokens per forward pass; None uses a single pass.
        ranks: They share the responses, which all of them have.

    Source: spec §3, §11.
    """
    rows = [row for example in examples for row in example.rows]
    scores = score_rows(model, rows, precision=precision, micro_batch_tokens=micro_batch_tokens, ranks=ranks)
    parts = scores.split([len(example.rows) for example in examples])
    pairs = [split_pairs(part, example.ranks) for part, example in zip(parts, examples, strict=True)]
    lengths = [split_pairs(torch.tensor(example.lengths).float(), example.ranks) for example in examples]
    chosen, rejected = (torch.cat(side) for side in zip(*pairs, strict=True))
    return Agreement(
        _accuracy(pairs), _accuracy(lengths), calibration(chosen - rejected), chosen.tolist(), rejected.tolist()
    )


def split_pairs(values: Tensor, ranks: Sequence[float]) -> tuple[Tensor, Tensor]:
    """The better and the worse response's value, for each pair of a prompt's responses that is not a tie."""
    pairs = [(i, j) for i, better in enumerate(ranks) for j, worse in enumerate(ranks) if better < worse]
    better, worse = torch.tensor(pairs, dtype=torch.long).reshape(-1, 2).unbind(dim=1)
    return values[better], values[worse]


def _quantiles(scores: Sequence[float]) -> list[float]:
    """Evenly spaced quantiles, from minimum to maximum; empty without scores."""
    values = torch.tensor(scores, dtype=torch.float64)
    levels = torch.linspace(0, 1, NUM_QUANTILES, dtype=torch.float64)
    return torch.quantile(values, levels).tolist() if scores else []


def _accuracy(pairs: Sequence[tuple[Tensor, Tensor]]) -> Interval:
    # Prompts are independent; the pairs of one prompt are not.
    return share_interval([float((1 + torch.sign(better - worse)).mean() / 2) for better, worse in pairs])
