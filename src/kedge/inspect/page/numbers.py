"""Figures on their way into the page: few digits, few points, and histograms where only quantiles are known."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

__all__ = ["Reduce", "as_figure", "blocks", "evenly", "histogram", "mean_of", "rounded"]

Reduce = Callable[[Sequence[float]], float]


def as_figure(value: Any) -> float | None:
    """A figure that can be drawn; None for null, texts, NaN and infinity."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def rounded(value: Any, digits: int = 5) -> Any:
    """The same with so many significant digits, however deep it nests: what a page needs, in half the bytes."""
    if isinstance(value, float):
        short = float(f"{value:.{digits}g}") if math.isfinite(value) else None
        return int(short) if short is not None and short.is_integer() and abs(short) < 1e15 else short
    if isinstance(value, dict):
        return {name: rounded(entry, digits) for name, entry in value.items()}
    return [rounded(entry, digits) for entry in value] if isinstance(value, (list, tuple)) else value


def evenly(count: int, most: int) -> list[int]:
    """Places of at most `most` of `count` things, evenly apart, the first and the last among them."""
    if count <= most:
        return list(range(count))
    if most == 1:
        return [count - 1]
    return sorted({round(index * (count - 1) / (most - 1)) for index in range(most)})


def blocks(count: int, most: int) -> list[range]:
    """`count` things in at most `most` runs of neighbours, all but the last of one length."""
    length = max(1, math.ceil(count / most))
    return [range(start, min(count, start + length)) for start in range(0, count, length)]


def mean_of(figures: Sequence[float]) -> float:
    """Their mean."""
    return sum(figures) / len(figures)


def histogram(quantiles: Sequence[float], edges: Sequence[float]) -> list[float]:
    """The share of a distribution in each bin, its quantiles joined by straight lines.

    Args:
        quantiles: Equally spaced ones, from the smallest value to the largest, ascending.
        edges: Of the bins, ascending.

    Returns:
        One share per bin; they sum to 1 where the edges hold all of it.
    """
    levels = np.linspace(0.0, 1.0, len(quantiles))
    values, places = np.asarray(quantiles, dtype=float), np.asarray(edges, dtype=float)
    # Where quantiles coincide, all of their mass lies at one value: it counts from that value on.
    below = np.interp(places, values, levels, left=0.0, right=1.0)
    below = np.where(places >= values[-1], 1.0, np.where(places < values[0], 0.0, below))
    below[0] = 0.0 if places[0] <= values[0] else below[0]
    return np.diff(below).tolist()
