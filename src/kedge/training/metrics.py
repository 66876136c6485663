"""Metrics of a training step, with their reduction over micro-batches and steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kedge.system.ranks import ALONE, Ranks

__all__ = ["Metric", "MetricTotals", "Reduction", "reduce_steps"]

Reduction = Literal["mean", "max", "min"]


@dataclass(frozen=True)
class Metric:
    """A value and its reduction.

    Attributes:
        value: A scalar on the device. For `mean` it is the micro-batch's share of the minibatch mean; shares add up.
        reduce: `mean`: summed over micro-batches, then averaged over steps. `max`, `min`: the extreme over both.
    """

    value: Tensor
    reduce: Reduction = "mean"

    def neutral(self) -> Metric:
        """A metric that does not change a total of this kind."""
        neutral = {"mean": 0.0, "max": -math.inf, "min": math.inf}[self.reduce]
        return Metric(torch.full_like(self.value, neutral), self.reduce)


class MetricTotals:
    """The metrics of one minibatch, accumulated over its micro-batches."""

    def __init__(self) -> None:
        self._totals: dict[str, Tensor] = {}
        self.reductions: dict[str, Reduction] = {}

    def add(self, metrics: Mapping[str, Metric]) -> None:
        """Add a micro-batch's metrics."""
        for name, metric in metrics.items():
            self.reductions[name] = metric.reduce
            total = self._totals.get(name)
            self._totals[name] = metric.value if total is None else _combine(metric.reduce, total, metric.value)

    def values(self, ranks: Ranks = ALONE) -> dict[str, float]:
        """The totals over all ranks as Python floats, with one device synchronization."""
        by_rank = ranks.everyones(torch.stack(list(self._totals.values())))
        totals = by_rank[0]
        for figures in by_rank[1:]:
            pairs = zip(self._totals, totals, figures, strict=True)
            totals = torch.stack([_combine(self.reductions[name], *pair) for name, *pair in pairs])
        return dict(zip(self._totals, totals.tolist(), strict=True))


def _combine(reduce: Reduction, one: Tensor, other: Tensor) -> Tensor:
    return {"mean": torch.add, "max": torch.maximum, "min": torch.minimum}[reduce](one, other)


def reduce_steps(steps: Sequence[Mapping[str, float]], reductions: Mapping[str, Reduction]) -> dict[str, float]:
    """Reduce each metric over all steps; `mean` unless `reductions` has another entry."""
    names: Iterable[str] = steps[0] if steps else ()
    extremes = {"max": max, "min": min}
    reduced: dict[str, float] = {}
    for name in names:
        values = [step[name] for step in steps]
        extreme = extremes.get(reductions.get(name, "mean"))
        reduced[name] = extreme(values) if extreme else sum(values) / len(values)
    return reduced
