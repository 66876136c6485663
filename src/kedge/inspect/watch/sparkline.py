"""A series of values as one line of text."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

__all__ = ["sparkline"]

BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int) -> str:
    """Values as block characters, from the lowest block for the smallest to the full one for the largest.

    Equal values are all drawn as the lowest block. With more values than characters, each character is the mean of its
    share. Non-finite values are left out; a character without any finite value is a space.

    Args:
        values: In order.
        width: Largest number of characters.
    """
    count = min(width, len(values))
    edges = [index * len(values) // count for index in range(count + 1)] if count else []
    means = [_mean(values[begin:end]) for begin, end in itertools.pairwise(edges)]
    finite = [mean for mean in means if math.isfinite(mean)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    return "".join(_block(mean, low, high) for mean in means)


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else math.nan


def _block(value: float, low: float, high: float) -> str:
    if not math.isfinite(value):
        return " "
    height = (value - low) / (high - low) if high > low else 0.0
    return BLOCKS[min(len(BLOCKS) - 1, int(height * len(BLOCKS)))]
