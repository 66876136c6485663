"""A metric's course in one line of text."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

__all__ = ["sparkline"]

BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(figures: Sequence[float], width: int) -> str:
    """Figures as blocks, the smallest as the lowest and the largest as the full one; all alike as the lowest.

    Where there are more figures than characters, each character is the mean of its share of them. What is not finite
    is left out, and a gap where nothing is left.

    Args:
        figures: In their order.
        width: The most characters.
    """
    count = min(width, len(figures))
    edges = [index * len(figures) // count for index in range(count + 1)] if count else []
    means = [_mean(figures[begin:end]) for begin, end in itertools.pairwise(edges)]
    finite = [mean for mean in means if math.isfinite(mean)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    return "".join(_block(mean, low, high) for mean in means)


def _mean(figures: Sequence[float]) -> float:
    finite = [figure for figure in figures if math.isfinite(figure)]
    return sum(finite) / len(finite) if finite else math.nan


def _block(figure: float, low: float, high: float) -> str:
    if not math.isfinite(figure):
        return " "
    height = (figure - low) / (high - low) if high > low else 0.0
    return BLOCKS[min(len(BLOCKS) - 1, int(height * len(BLOCKS)))]
