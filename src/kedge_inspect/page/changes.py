"""Describes the change of a metric over a run, and formats numbers for sentences."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

from kedge_inspect.page.numbers import numbers_of
from kedge_inspect.record import RunRecord

WINDOW = 20
"""First and last values are means over the first and last 1/`WINDOW` of the run."""

ROUNDING = 1e-6
CERTAIN = 3.0
"""Standard errors from which a change is more than noise: a table has a dozen changes."""

NEGLIGIBLE = 0.01
"""Share of the larger of two values below which their difference is noise."""

FEWEST = 4
"""Number of updates from which the noise of a series can be estimated."""

MINUS = "\u2212"


@dataclass(frozen=True)
class Ends:
    """A metric's first and last value, and the standard error of their difference; infinite if unknown."""

    first: float
    last: float
    error: float = 0.0

    @property
    def is_change(self) -> bool:
        """True if the values differ by more than noise."""
        least = NEGLIGIBLE * max(abs(self.first), abs(self.last))
        return abs(self.last - self.first) > max(least, CERTAIN * self.error)


def ends_of(record: RunRecord, metric: str) -> Ends | None:
    """The first and last value of a metric; None for a run without it."""
    numbers = numbers_of(record.metrics, metric)
    width = max(1, len(numbers) // WINDOW)
    if not numbers:
        return None
    first, last = _snapped(fmean(numbers[:width]), fmean(numbers[-width:]))
    return Ends(first, last, math.sqrt(2 / width) * noise(numbers) if len(record.metrics) >= FEWEST else math.inf)


def _snapped(first: float, last: float) -> tuple[float, float]:
    """Set a value to 0 if it is only a rounding error compared with the other."""
    least = ROUNDING * max(abs(first), abs(last))
    return 0.0 if abs(first) < least else first, 0.0 if abs(last) < least else last


def noise(values: Sequence[float]) -> float:
    """Standard deviation of a series around its trend; 0 for fewer than 3 values.

    From second differences, where a steady rise or fall cancels; independent noise has 6 times its variance there.
    """
    steps = [after - before for before, after in pairwise(values)]
    second = [after - before for before, after in pairwise(steps)]
    return math.sqrt(fmean(each**2 for each in second) / 6) if second else 0.0


def change_of(ends: Ends, slack: float = 0.0) -> str:
    """`rose from 1 to 5`, or `stayed near 5` for a change within `slack` or the noise."""
    first = figure(ends.first)
    last = figure(ends.last)
    if first == last or not ends.is_change or abs(ends.last - ends.first) < slack:
        return f"stayed near {last}"
    return f"{'rose' if ends.last > ends.first else 'fell'} from {first} to {last}"


def joined(parts: Sequence[str]) -> str:
    """Join the parts to a sentence; empty without parts."""
    text = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])}, and {parts[-1]}" if parts else ""
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def figure(value: float) -> str:
    """Format a number with three significant digits, or from 1,000 to a million as a whole number."""
    text = f"{value:,.0f}" if 999.5 <= abs(value) < 999_999.5 else f"{value:.3g}"
    return text.replace("-", MINUS)


def share(value: float) -> str:
    """Format a share as a percentage."""
    return f"{value:.0%}".replace("-", MINUS)


def ranged(interval: Mapping[str, Any], show: Callable[[float], str] = figure) -> str:
    """A figure with its interval, if that is known: `2.5 (1.9 to 3.1)`."""
    limits = "" if interval["low"] is None else f" ({show(interval['low'])} to {show(interval['high'])})"
    return f"{show(interval['value'])}{limits}"


def percent(interval: Mapping[str, Any]) -> str:
    """A share with its interval: `57% (50% to 64%)`."""
    return ranged(interval, share)
