"""The mean over seeds with Student's interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev

__all__ = ["MeanInterval", "mean_interval"]

# The 97.5 % quantiles of Student's t distribution with 1 to 30 degrees of freedom.
T_QUANTILES = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
NORMAL_QUANTILE = 1.960


@dataclass(frozen=True)
class MeanInterval:
    """A mean with its 95 % interval.

    Attributes:
        value: The mean.
        low: Lower end of the interval; NaN for a single value.
        high: Upper end.
    """

    value: float
    low: float
    high: float

    @property
    def is_known(self) -> bool:
        """Whether there were enough values for an interval."""
        return not math.isnan(self.low)


def mean_interval(values: Sequence[float]) -> MeanInterval:
    """The mean of independent values with Student's 95 % interval: x̄ ± t·s/√n; NaN ends for a single value.

    Args:
        values: One number per seed; at least one.
    """
    if len(values) == 1:
        return MeanInterval(values[0], math.nan, math.nan)
    degrees = len(values) - 1
    quantile = T_QUANTILES[degrees - 1] if degrees <= len(T_QUANTILES) else NORMAL_QUANTILE
    half = quantile * stdev(values) / math.sqrt(len(values))
    return MeanInterval(mean(values), mean(values) - half, mean(values) + half)
