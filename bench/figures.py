"""Figures from measurements: medians over rounds, ratios within a round, and the FLOP limit."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from bench.systems import Measurement


class Spread(NamedTuple):
    """A figure over the rounds."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Median, lowest and highest of at least one value."""
    return Spread(median(values), min(values), max(values))


def ratios(numerator: Sequence[Measurement], denominator: Sequence[Measurement], figure: str) -> list[float]:
    """A figure of one job divided by that of another, per round, so that slow rounds cancel out."""
    pairs = zip(numerator, denominator, strict=True)
    return [getattr(above, figure) / getattr(below, figure) for above, below in pairs]


def seconds_per_token(measurement: Measurement) -> float:
    """Seconds per real token of an update."""
    return measurement.seconds / measurement.num_tokens


def growths(base: Sequence[Measurement], other: Sequence[Measurement]) -> list[float]:
    """Relative increase of the cost per real token over `base`, per round: 0.1 is 10 % more."""
    return [seconds_per_token(above) / seconds_per_token(below) - 1 for above, below in zip(other, base, strict=True)]


def flop_limit(*, num_epochs: int, separate_critic: bool) -> float:
    """The minimum arithmetic of an update, in SFT steps on the same tokens.

    (3 + c)/3 + E·(1 + c),   E epochs; c = 1 with a separate critic, 0 with a head on the policy's trunk

    A forward pass is a third of an SFT step, a backward pass two thirds. Generation, reference and reward model take a
    forward pass each, and a separate critic one for its values; each epoch trains the policy and a separate critic.
    """
    critic = int(separate_critic)
    return (3 + critic) / 3 + num_epochs * (1 + critic)
