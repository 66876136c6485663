"""A metric's course over a run, and what can be said of it in spite of its noise.

Everything is a median: one odd update is no finding, and sixteen updates have to be enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from kedge.inspect.record import RunRecord
from kedge.logs.progress import format_figure

__all__ = ["CERTAIN", "TREND", "WINDOW", "Course", "combined", "course", "fell", "figure", "rose", "span"]

ENOUGH = 4
"""Updates before anything is said of a figure's size: a live run is to be told early, but not of its first step."""

TREND = 8
"""Updates before anything is said of its course: early and late ones, with room between them."""

WINDOW = 3
"""Fewest updates of a median: the least that bear one that is odd."""

CERTAIN = 3.0
"""Standard errors that make a difference. A run has dozens of courses, and two would be passed by chance every day."""

MEDIAN_ERROR = 1.25
"""Standard error of a median, in those of a mean: √(π/2)."""

MAD_TO_STD = 1.4826
"""Standard deviation of a normal variable, in its median absolute deviations."""


@dataclass(frozen=True)
class Course:
    """The figures of a metric, and the updates that have them."""

    updates: Sequence[int]
    figures: Sequence[float]

    def __len__(self) -> int:
        return len(self.figures)

    def where(self, counts: Callable[[float], bool]) -> Course:
        """The part of it whose figures count."""
        kept = [(update, value) for update, value in zip(self.updates, self.figures, strict=True) if counts(value)]
        return Course([update for update, _ in kept], [value for _, value in kept])

    @property
    def window(self) -> int:
        """Updates that are late: a quarter of the run."""
        return max(WINDOW, len(self) // 4)

    @property
    def first(self) -> float:
        """The first figure. Of what is sampled it is the model's that the run started from, which nothing has moved."""
        return self.figures[0]

    @property
    def early(self) -> float:
        """Median of the first few updates: what there was before much was learnt."""
        return median(self.figures[:WINDOW])

    @property
    def late(self) -> float:
        """Median of the last quarter."""
        return median(self.figures[-self.window :])

    @property
    def highest(self) -> int:
        """The update of its largest figure."""
        return self.updates[max(range(len(self)), key=lambda index: self.figures[index])]

    @property
    def peak(self) -> float:
        """The largest median of three updates in a row."""
        return max(self._rolling())

    @property
    def peak_updates(self) -> Sequence[int]:
        """Which updates those were."""
        rolling = self._rolling()
        first = rolling.index(max(rolling))
        return self.updates[first : first + WINDOW]

    @property
    def peak_span(self) -> str:
        """The same in words."""
        return span(self.peak_updates)

    def at(self, updates: Sequence[int]) -> float:
        """Median of some updates."""
        return median(value for update, value in zip(self.updates, self.figures, strict=True) if update in updates)

    @property
    def late_span(self) -> str:
        """Which updates are late ones: `updates 13 to 16`."""
        return span(self.updates[-self.window :])

    @property
    def middle(self) -> float:
        """Median of the whole run."""
        return median(self.figures)

    @property
    def middle_error(self) -> float:
        """Standard error of `middle`, of figures that lie around it by chance."""
        spread = MAD_TO_STD * median(abs(value - self.middle) for value in self.figures)
        return MEDIAN_ERROR * spread / math.sqrt(len(self))

    @property
    def rise(self) -> float:
        """Late less early."""
        return self.late - self.early

    @property
    def error(self) -> float:
        """Standard error of `rise`: of two medians of figures as noisy as neighbours differ."""
        steps = [after - before for before, after in zip(self.figures, self.figures[1:], strict=False)]
        noise = MAD_TO_STD * median(map(abs, steps)) / math.sqrt(2) if steps else math.inf
        return MEDIAN_ERROR * noise * math.sqrt(1 / WINDOW + 1 / self.window)

    def _rolling(self) -> list[float]:
        last = max(1, len(self) - WINDOW + 1)
        return [median(self.figures[first : first + WINDOW]) for first in range(last)]


def course(run: RunRecord, name: str, *, least: int = ENOUGH) -> Course | None:
    """A metric's course, without figures that are no numbers; None where fewer than `least` updates have it.

    Args:
        run: Whose metric.
        name: Which one.
        least: Updates that make it worth a look.
    """
    found = Course(*run.series(name)).where(math.isfinite)
    return found if len(found) >= max(least, 1) else None


def combined(
    run: RunRecord, names: Sequence[str], make: Callable[..., float | None], *, least: int = ENOUGH
) -> Course | None:
    """The course of a figure that is made of several metrics, over the updates that have all of them.

    Args:
        run: Whose metrics.
        names: Which ones.
        make: Makes one figure of theirs; None where there is none.
        least: Updates that make it worth a look.
    """
    series = [dict(zip(*run.series(name), strict=True)) for name in names]
    updates = sorted(set(series[0]).intersection(*series[1:]))
    made = [(update, make(*(each[update] for each in series))) for update in updates]
    kept = [(update, value) for update, value in made if value is not None]
    return Course([update for update, _ in kept], [value for _, value in kept]) if len(kept) >= least else None


def rose(found: Course | None) -> bool:
    """Whether a course has come up, beyond its noise."""
    return found is not None and len(found) >= TREND and found.rise > CERTAIN * found.error


def fell(found: Course | None) -> bool:
    """Whether it has come down, beyond its noise."""
    return found is not None and len(found) >= TREND and -found.rise > CERTAIN * found.error


def span(updates: Sequence[int]) -> str:
    """Updates in words."""
    return f"updates {updates[0]} to {updates[-1]}" if len(updates) > 1 else f"update {updates[0]}"


def figure(value: float) -> str:
    """A figure as findings write it."""
    return format_figure(value)
