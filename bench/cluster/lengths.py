"""The responses that still run after t tokens: the distribution that assumes least, given mean and longest."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

POINTS = 96
"""Of the midpoint rule over a batch's lengths; twice as many change no time by 1 %."""


@dataclass(frozen=True)
class Lengths:
    """Lengths between 0 and `longest` with the given mean and the largest entropy: a truncated exponential.

    P(length > t) = (e^(−λt) − e^(−λL)) / (1 − e^(−λL)),   with λ such that the mean is 1/λ − L/(e^(λL) − 1)

    λ is negative when most responses are longer than half of the longest.

    Attributes:
        mean: Tokens.
        longest: Tokens, L.
    """

    mean: float
    longest: float

    @property
    def rate(self) -> float:
        """λ times the longest length; by bisection."""
        goal = self.mean / self.longest
        low = -700.0
        high = 700.0
        for _ in range(80):
            middle = (low + high) / 2
            low, high = (middle, high) if _mean_share(middle) > goal else (low, middle)
        return (low + high) / 2

    def running(self, responses: float) -> tuple[tuple[float, float, float], ...]:
        """The responses still running, of many that start together.

        Args:
            responses: Started.

        Returns:
            Pieces of the time until the last one is expected to end: tokens from the start to the middle of the piece,
            the piece's tokens, and the share of the responses that still run.
        """
        return _running(self, responses)


@lru_cache(maxsize=64)
def _running(lengths: Lengths, responses: float) -> tuple[tuple[float, float, float], ...]:
    """As `Lengths.running`; a sweep asks for the same batch again and again."""
    rate = lengths.rate
    # The largest of n lengths is about the quantile n / (n + 1).
    end = lengths.longest * _place(1.0 / (responses + 1.0), rate)
    width = end / POINTS
    middles = [(index + 0.5) * width for index in range(POINTS)]
    return tuple((middle, width, _survival(middle / lengths.longest, rate)) for middle in middles)


def _survival(place: float, rate: float) -> float:
    """P(length > place · L)."""
    if abs(rate) < 1e-6:
        return 1.0 - place
    return math.expm1(rate * (1.0 - place)) / math.expm1(rate)


def _mean_share(rate: float) -> float:
    """The mean length in units of L."""
    if abs(rate) < 1e-4:
        return 0.5 - rate / 12.0
    return 1.0 / rate - 1.0 / math.expm1(rate)


def _place(survival: float, rate: float) -> float:
    """The place where P(length > place · L) has fallen to `survival`."""
    if abs(rate) < 1e-6:
        return 1.0 - survival
    return 1.0 - math.log1p(survival * math.expm1(rate)) / rate
