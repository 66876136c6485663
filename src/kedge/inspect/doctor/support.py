"""The support of a critic that predicts a histogram, compared with the returns that it has to cover."""

from __future__ import annotations

import math
from collections.abc import Iterator

from kedge.inspect.doctor.finding import Remedy, Symptom
from kedge.inspect.doctor.remedies import set_to
from kedge.inspect.doctor.trends import MIN_TREND, fmt, read
from kedge.inspect.record import RunRecord

__all__ = ["support_symptom"]

OUTSIDE = 0.05
"""Share of returns outside the support at which it is too narrow; they are predicted as its end."""

MOSTLY_OUTSIDE = 0.5
"""Share of returns outside the support at which the critic mostly predicts a constant."""

COARSE = 2.0
"""Width of a bin, in standard deviations of the returns: a target's Gaussian is then 1.5 times as wide as the returns
are spread, so that targets hardly differ."""

REACH = 5.0
"""Distance of the suggested ends from the mean return, in standard deviations of the returns."""


def support_symptom(run: RunRecord, returns_std: float) -> Symptom | None:
    """A support that is too narrow or too wide for the returns; None if it fits, or the critic has none.

    Args:
        run: The run.
        returns_std: Late standard deviation of its returns.
    """
    outside, mean = (
        read(run, "value/outside_support", at_least=MIN_TREND),
        read(run, "value/returns_mean", at_least=MIN_TREND),
    )
    ends = [run.setting(field) for field in ("ppo.value_min", "ppo.value_max", "ppo.value_num_bins")]
    if outside is None or mean is None or not all(isinstance(each, (int, float)) for each in ends):
        return None
    low, high, num_bins = ends
    wanted = [_outwards(mean.late + sign * REACH * returns_std, sign) for sign in (-1, 1)]
    if outside.late >= OUTSIDE:
        return Symptom(
            "serious" if outside.late >= MOSTLY_OUTSIDE else "warning",
            f"{outside.late:.0%} of the returns are outside the critic's support, {fmt(low)} to {fmt(high)} "
            f"({outside.late_span})",
            tuple(_widen(run, min(low, wanted[0]), max(high, wanted[1]))),
        )
    width = (high - low) / num_bins
    if width < COARSE * returns_std:
        return None
    return Symptom(
        "note",
        f"a bin of the critic's support is {fmt(width)} wide, and the returns' standard deviation is "
        f"{fmt(returns_std)} ({mean.late_span})",
        (set_to(run, "ppo.value_min", wanted[0], "too_low"), set_to(run, "ppo.value_max", wanted[1], "too_high")),
    )


def _widen(run: RunRecord, low: float, high: float) -> Iterator[Remedy]:
    if low < run.setting("ppo.value_min"):
        yield set_to(run, "ppo.value_min", low, "too_high")
    if high > run.setting("ppo.value_max"):
        yield set_to(run, "ppo.value_max", high, "too_low")


def _outwards(value: float, sign: int) -> float:
    """Rounded to two digits, away from the mean."""
    if value == 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(abs(value))) - 1)
    return round((math.floor if sign < 0 else math.ceil)(value / unit) * unit, 12)
