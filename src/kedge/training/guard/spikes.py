"""Detects steps far outside the run's history."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

__all__ = ["SpikeDetector"]

NORMAL = 1.4826
"""Ratio of standard deviation to median absolute deviation of a normal distribution."""

SMALLEST_SPREAD = 0.01
"""Lower bound of the spread, so that rounding errors are no spikes in a nearly constant history: 1 % of a norm, 0.01 of
a loss."""


def _log(norm: float) -> float:
    """Norms are compared by their logarithm; 0 is treated as 1e-30."""
    return math.log(max(norm, 1e-30))


WATCHED: Mapping[str, Callable[[float], float]] = {
    "policy/grad_norm": _log,
    "value/grad_norm": _log,
    "loss/total": float,
}
"""The metrics checked for spikes, with the scale of the comparison; a step need not have all of them."""


class SpikeDetector:
    """Compares each step with the steps before it.

    spike:  x > median + k·σ,   σ = 1.4826 · median |x − median|   over the last n steps taken

    x is the log of the gradient norm, or the loss. Medians are used because the spikes themselves would inflate a mean
    and a standard deviation. The first n steps are never spikes.

    Args:
        sigma: k > 0.
        history: n ≥ 1.

    Source: Leys et al. 2013, "Detecting outliers: do not use standard deviation around the mean".
    """

    def __init__(self, *, sigma: float, history: int) -> None:
        self._sigma, self._length = sigma, history
        self._past: dict[str, deque[float]] = {name: deque(maxlen=history) for name in WATCHED}

    def find(self, figures: Mapping[str, float]) -> str | None:
        """Describe the first metric of a step that is a spike; None if there is none."""
        for name, scale in WATCHED.items():
            past = self._past[name]
            if name not in figures or len(past) < self._length:
                continue
            middle = median(past)
            spread = max(NORMAL * median(abs(x - middle) for x in past), SMALLEST_SPREAD)
            distance = (scale(figures[name]) - middle) / spread
            if distance > self._sigma:
                return (
                    f"{name} is {figures[name]:.4g}, {distance:.3g} σ above the median of the last {self._length} steps"
                )
        return None

    def add(self, figures: Mapping[str, float]) -> None:
        """Add a step to the history."""
        for name, scale in WATCHED.items():
            if name in figures:
                self._past[name].append(scale(figures[name]))

    def clear(self) -> None:
        """Forget the history."""
        for past in self._past.values():
            past.clear()

    def state_dict(self) -> dict[str, Any]:
        """The history, as JSON types."""
        return {name: list(past) for name, past in self._past.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`."""
        self.clear()
        for name, past in self._past.items():
            past.extend(state.get(name, []))  # earlier versions watched fewer metrics
