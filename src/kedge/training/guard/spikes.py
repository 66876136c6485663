"""Detects steps far outside of the run's history."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

__all__ = ["SpikeDetector"]

NORMAL = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""

SMALLEST_SPREAD = 0.01
"""Lower bound of the spread, so that a nearly constant history makes no spike of a rounding error: 1 % of a norm, 0.01
of a loss."""


def _log(norm: float) -> float:
    """Norms differ by factors; 0 counts as very small."""
    return math.log(max(norm, 1e-30))


WATCHED: Mapping[str, Callable[[float], float]] = {"policy/grad_norm": _log, "loss/total": float}
"""The metrics that are watched, with the scale of the comparison."""


class SpikeDetector:
    """Compares each step with those before it.

    spike:  x > median + k·σ,   σ = 1.4826 · median |x − median|   over the last n steps that were taken

    x is the log of the gradient's norm, and the loss. Medians, because a mean and its deviation grow with the very
    spikes that they should detect. During the first n steps nothing is a spike.

    Args:
        sigma: k > 0.
        history: n ≥ 1.

    Source: Leys et al. 2013, "Detecting outliers: do not use standard deviation around the mean".
    """

    def __init__(self, *, sigma: float, history: int) -> None:
        self._sigma, self._length = sigma, history
        self._past: dict[str, deque[float]] = {name: deque(maxlen=history) for name in WATCHED}

    def find(self, figures: Mapping[str, float]) -> str | None:
        """The first metric of a step that is a spike, in words."""
        for name, scale in WATCHED.items():
            past = self._past[name]
            if len(past) < self._length:
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
        """Add a step that was taken to the history."""
        for name, scale in WATCHED.items():
            self._past[name].append(scale(figures[name]))

    def state_dict(self) -> dict[str, Any]:
        """The history, in JSON's types."""
        return {name: list(past) for name, past in self._past.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        for name, past in self._past.items():
            past.clear()
            past.extend(state[name])
