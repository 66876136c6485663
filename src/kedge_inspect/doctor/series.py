"""The time series of a metric, and statistics of it that are robust to noise.

Everything is a median: a single outlier is never a finding, and sixteen updates suffice for one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from kedge_base.machine.progress import format_figure
from kedge_inspect.record import RunRecord
from kedge_inspect.resolved import value_warmup_of

MIN_LEVEL = 4
"""Updates needed to assess a metric's level: early enough to warn a live run, but not from its first step."""

MIN_TREND = 8
"""Updates needed to assess a trend: early and late ones with a gap between them."""

WINDOW = 3
"""Fewest updates in a median: the smallest number that tolerates one outlier."""

SIGNIFICANT = 3.0
"""Standard errors that make a change significant. A run has dozens of metrics: with two, some would be significant by
chance.
"""

MEDIAN_ERROR = 1.25
"""Standard error of a median, relative to that of a mean: √(π/2)."""

MAD_TO_STD = 1.4826
"""Standard deviation of a normal variable, relative to its median absolute deviation."""


@dataclass(frozen=True)
class Series:
    """The values of a metric, and the updates that they belong to."""

    updates: Sequence[int]
    values: Sequence[float]

    def __len__(self) -> int:
        return len(self.values)

    @staticmethod
    def of(values: Iterable[tuple[int, float]]) -> Series:
        """Make a series from pairs of an update and its value."""
        pairs = list(values)
        return Series([update for update, _ in pairs], [value for _, value in pairs])

    @property
    def items(self) -> Iterable[tuple[int, float]]:
        """Each update with its value."""
        return zip(self.updates, self.values, strict=True)

    def where(self, keep: Callable[[float], bool]) -> Series:
        """The updates with a value that satisfies a condition."""
        return Series.of(item for item in self.items if keep(item[1]))

    @property
    def window(self) -> int:
        """Number of late updates: a quarter of the run."""
        return max(WINDOW, len(self) // 4)

    @property
    def first(self) -> float:
        """The first value. For sampled metrics it is that of the initial policy, before any step."""
        return self.values[0]

    @property
    def early(self) -> float:
        """Median of the first few updates."""
        return median(self.values[:WINDOW])

    @property
    def start(self) -> float:
        """The larger of `first` and `early`, for spreads: that of a single update is 0 if all its scores are equal."""
        return max(self.first, self.early)

    @property
    def late(self) -> float:
        """Median of the last quarter."""
        return median(self.values[-self.window :])

    @property
    def late_span(self) -> str:
        """The updates of `late`: `updates 13 to 16`."""
        return span(self.updates[-self.window :])

    @property
    def argmax(self) -> int:
        """The update with the largest value."""
        return self.updates[self.values.index(max(self.values))]

    @property
    def peak(self) -> float:
        """The largest median of three consecutive updates."""
        return max(self._rolling())

    @property
    def peak_updates(self) -> Sequence[int]:
        """The updates of `peak`."""
        rolling = self._rolling()
        first = rolling.index(max(rolling))
        return self.updates[first : first + WINDOW]

    def during(self, updates: Sequence[int]) -> float:
        """Median from the first to the last of these updates; NaN without a value there."""
        found = [value for update, value in self.items if updates[0] <= update <= updates[-1]]
        return median(found) if found else math.nan

    @property
    def steps(self) -> list[float]:
        """Differences between consecutive values."""
        return [after - before for before, after in pairwise(self.values)]

    @property
    def rise(self) -> float:
        """`late` minus `early`."""
        return self.late - self.early

    @property
    def rise_error(self) -> float:
        """Standard error of `rise`."""
        return self.since(WINDOW)[1]

    def since(self, count: int) -> tuple[float, float]:
        """`late` minus the median of the first `count` values, and its standard error.

        The noise is estimated from consecutive differences.
        """
        noise = MAD_TO_STD * median(map(abs, self.steps)) / math.sqrt(2) if len(self) > 1 else math.inf
        of_start = 1.0 if count == 1 else MEDIAN_ERROR / math.sqrt(count)
        error = noise * math.hypot(of_start, MEDIAN_ERROR / math.sqrt(self.window))
        return self.late - median(self.values[:count]), error

    def _rolling(self) -> list[float]:
        last = max(1, len(self) - WINDOW + 1)
        return [median(self.values[first : first + WINDOW]) for first in range(last)]


def read(run: RunRecord, name: str, *, at_least: int = MIN_LEVEL, of_policy: bool = False) -> Series | None:
    """A metric's finite values; None if fewer than `at_least` updates have one.

    Args:
        run: The run.
        name: The metric.
        at_least: Updates required.
        of_policy: Leave out the critic's warm-up, in which the policy is frozen.
    """
    found = Series(*run.series(name))
    if of_policy:
        warm_up = value_warmup_of(run)
        found = Series.of(item for item in found.items if item[0] > warm_up)
    return found if len(found) >= max(at_least, 1) else None


def combine(make: Callable[[float, float], float | None], first: Series, second: Series) -> Series | None:
    """Compute a series from two, over the updates that have both; None if no update does.

    Args:
        make: Computes a value from both, in that order; None to leave the update out.
        first: The first.
        second: The second.
    """
    others = dict(second.items)
    made = ((update, make(value, others[update])) for update, value in first.items if update in others)
    found = Series.of((update, value) for update, value in made if value is not None)
    return found if found else None


def rose(series: Series | None) -> bool:
    """True if a series rose significantly."""
    return series is not None and len(series) >= MIN_TREND and series.rise > SIGNIFICANT * series.rise_error


def fell(series: Series | None) -> bool:
    """True if a series fell significantly."""
    return series is not None and len(series) >= MIN_TREND and -series.rise > SIGNIFICANT * series.rise_error


def span(updates: Sequence[int]) -> str:
    """`updates 13 to 16`, or `update 13`."""
    return f"updates {updates[0]} to {updates[-1]}" if len(updates) > 1 else f"update {updates[0]}"


fmt = format_figure
"""Formats the numbers of findings."""
