"""Confidence intervals that hold for small samples: of means, of shares and win rates, and from resampling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

from kedge_base.errors import ShapeError

ENOUGH_UNITS = 30
"""Number of units from which the resamples' quantiles are used as the interval. For a mean, they cover 74 % of the time
with 3 values, 87 % with 10, and 94 % with 30.
"""

CONFIDENCE = 0.95
"""Coverage of intervals: the share of repetitions with the true figure inside their interval."""

LARGE = 500
"""Degrees of freedom from which two terms of the t quantile's expansion are exact to 1e-5."""


@dataclass(frozen=True)
class Interval:
    """A figure with its confidence interval.

    Attributes:
        value: The figure.
        low: Lower end of the interval; not finite if there are too few values for one.
        high: Upper end.
    """

    value: float
    low: float
    high: float

    @property
    def is_known(self) -> bool:
        """True if there were enough values for an interval."""
        return math.isfinite(self.low) and math.isfinite(self.high)

    def as_json(self) -> dict[str, float | None]:
        """The three figures; null ends if the interval is unknown."""
        low, high = (self.low, self.high) if self.is_known else (None, None)
        return {"value": self.value, "low": low, "high": high}

    def __str__(self) -> str:
        """`0.71 (0.66–0.76)`."""
        limits = f" ({self.low:.2f}–{self.high:.2f})" if self.is_known else ""
        return f"{self.value:.2f}{limits}"


def mean_interval(values: Sequence[float], *, confidence: float = CONFIDENCE) -> Interval:
    """The mean of independent values with Student's interval: x̄ ± t·s/√n; unknown for a single value.

    Args:
        values: One number per independent unit (a prompt, a seed); at least one.
        confidence: Coverage: the share of repetitions with the true mean inside their interval, in (0, 1).

    Raises:
        ShapeError: No values, non-finite values, or a confidence out of range.

    Source: Student 1908.
    """
    _check(values, confidence)
    mean = fmean(values)
    count = len(values)
    if count == 1:
        return Interval(mean, math.nan, math.nan)
    half = student_quantile(confidence, count - 1) * stdev(values) / math.sqrt(count)
    return Interval(mean, mean - half, mean + half)


def share_interval(values: Sequence[float], *, confidence: float = CONFIDENCE) -> Interval:
    """The mean of independent shares in [0, 1], such as wins with ties at ½, with its interval.

    c ± z·√(v/(N − 1)),   N = n + z²,   c and v: mean and variance of the values, z²/2 zeros and z²/2 ones

    This is Wilson's center with a measured variance, so that ties narrow the interval, and all ties also have an
    interval. For all losses or all wins, it is exact:

    0 to 1 − α^(1/n),   or   α^(1/n) to 1,   with α = (1 − confidence)/2

    Args, errors: As in `mean_interval`; a value outside [0, 1] is also an error.

    Source: Agresti and Coull 1998; added values instead of counts, for ties, as in Bonett and Price 2012; Clopper and
        Pearson 1934.
    """
    _check(values, confidence)
    if not all(0 <= each <= 1 for each in values):
        raise ShapeError(f"shares are in [0, 1], got {min(values):g} to {max(values):g}")
    value = fmean(values)
    reach = ((1 - confidence) / 2) ** (1 / len(values))
    if value in (0, 1):
        return Interval(0.0, 0.0, 1 - reach) if value == 0 else Interval(1.0, reach, 1.0)
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    added = z**2 / 2
    total = len(values) + 2 * added
    center = (math.fsum(values) + added) / total
    variance = (math.fsum(each * each for each in values) + added) / total - center**2
    half = z * math.sqrt(variance / max(total - 1, 1.0))
    return Interval(value, max(0.0, center - half), min(1.0, center + half))


def score_interval(groups: Sequence[Sequence[float]]) -> Interval:
    """The mean of the groups' mean scores, with the interval of a share if the scores look like shares, else of a mean.

    Scores look like shares if they are in [0, 1] and the highest is exactly 1, as with partial credit, or if all are 0.
    Near the highest possible score, Student's interval exceeds it and undercovers.

    Args:
        groups: The scores of each independent unit, such as the responses to a prompt; at least one of each.

    Raises:
        ShapeError: As in `mean_interval`.
    """
    scores = [each for group in groups for each in group]
    of = share_interval if min(scores, default=0) >= 0 and max(scores, default=0) in (0, 1) else mean_interval
    return of([fmean(group) for group in groups])


def resampled_interval(
    value: float,
    resamples: Sequence[float],
    num_units: int,
    *,
    bounds: tuple[float, float] = (-math.inf, math.inf),
) -> Interval:
    """A figure other than a mean, with an interval from bootstrap resamples of the units it was computed from.

    From 30 units on, the interval is the resamples' quantiles; with fewer, value ± t·s·√(n/(n − 1)), where s is the
    resamples' standard deviation; for a single unit, all of `bounds`.

    Args:
        value: The figure of the sample.
        resamples: The figure of each resample; NaN where it cannot be computed.
        num_units: Independent units (prompts, seeds) that are resampled, n.
        bounds: The least and the largest possible figure.

    Source: Efron 1979; Hesterberg 2015 (arXiv 1411.5279), section 4, for few units.
    """
    known = sorted(each for each in resamples if not math.isnan(each))
    if num_units < 2 or len(known) < 2:
        return Interval(value, *bounds)
    if num_units < ENOUGH_UNITS:
        half = student_quantile(CONFIDENCE, num_units - 1) * stdev(known) * math.sqrt(num_units / (num_units - 1))
        return Interval(value, max(bounds[0], value - half), min(bounds[1], value + half))
    tail = (1 - CONFIDENCE) / 2
    low, high = (known[round(share * (len(known) - 1))] for share in (tail, 1 - tail))
    return Interval(value, low, high)


def student_quantile(confidence: float, degrees: int) -> float:
    """Compute t with P(|T| ≤ t) = confidence, by bisection of the angle θ = arctan(t/√ν).

    Args:
        confidence: In (0, 1).
        degrees: Degrees of freedom, ν ≥ 1.

    Source: Abramowitz and Stegun 26.7.3, 26.7.4; 26.7.5 for many degrees.
    """
    if degrees > LARGE:
        z = NormalDist().inv_cdf((1 + confidence) / 2)
        return z + (z**3 + z) / (4 * degrees)
    low = 0.0
    high = math.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        low, high = (angle, high) if _within(angle, degrees) < confidence else (low, angle)
    return math.sqrt(degrees) * math.tan(low)


def _within(angle: float, degrees: int) -> float:
    """P(|T| ≤ √ν·tan θ): a finite series in cos²θ."""
    is_odd = degrees % 2
    term = math.cos(angle) if is_odd else 1.0
    total = 0.0
    for power in range(2 + is_odd, degrees + 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (power - 1) / power
    return 2 / math.pi * (angle + math.sin(angle) * total) if is_odd else math.sin(angle) * total


def _check(values: Sequence[float], confidence: float) -> None:
    if not values or not all(map(math.isfinite, values)):
        raise ShapeError(f"an interval needs a non-empty list of finite values, got {len(values)} values")
    if not 0 < confidence < 1:
        raise ShapeError(f"confidence {confidence} must be in (0, 1)")
