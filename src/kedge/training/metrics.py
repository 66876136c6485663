"""Metrics of a training step that carry their own reduction over micro-batches and steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

__all__ = ["Metric", "MetricTotals", "Reduction", "reduce_steps"]

Reduction = Literal["mean", "max", "min"]


@dataclass(frozen=True)
class Metric:
    """A number and how it is combined with others of its name.

    Attributes:
        value: A scalar on the device. For `mean` it is a micro-batch's share of its minibatch's mean: shares add up.
        reduce: `mean`: shares are summed over micro-batches, and sums averaged over steps. `max` and `min`: the extreme
            of all.
    """

    value: Tensor
    reduce: Reduction = "mean"


class MetricTotals:
    """The metrics of one minibatch, from those of its micro-batches."""

    def __init__(self) -> None:
        self._totals: dict[str, Tensor] = {}
        self.reductions: dict[str, Reduction] = {}

    def add(self, metrics: Mapping[str, Metric]) -> None:
        """Add a micro-batch's metrics."""
        for name, metric in metrics.items():
            self.reductions[name] = metric.reduce
            combine = {"mean": torch.add, "max": torch.maximum, "min": torch.minimum}[metric.reduce]
            total = self._totals.get(name)
            self._totals[name] = metric.value if total is None else combine(total, metric.value)

    def values(self) -> dict[str, float]:
        """The totals as Python floats, with one wait for the device."""
        return dict(zip(self._totals, torch.stack(list(self._totals.values())).tolist(), strict=True))


def reduce_steps(steps: Sequence[Mapping[str, float]], reductions: Mapping[str, Reduction]) -> dict[str, float]:
    """Each metric over all steps: the mean, or the extreme where its reduction says so."""
    names: Iterable[str] = steps[0] if steps else ()
    extremes = {"max": max, "min": min}
    reduced: dict[str, float] = {}
    for name in names:
        values = [step[name] for step in steps]
        extreme = extremes.get(reductions.get(name, "mean"))
        reduced[name] = extreme(values) if extreme else sum(values) / len(values)
    return reduced
