"""Lines with confidence bands, baselines, and labels at their ends."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes

from handbook.palette import MUTED, Quantity
from handbook.style import DASHED, limit_axis

LABEL_WIDTH = 18
"""Characters per line of a label."""

LABEL_GAP = 0.075
"""Smallest distance between two line labels, as a fraction of the axes' height."""


@dataclass(frozen=True)
class Line:
    """One line of a plot.

    Attributes:
        x: Positions.
        y: Values; NaN leaves a gap.
        quantity: Quantity of the values; decides the color and the limits of the axis.
        label: Text at its end, in front of the last value; may be empty.
        low: Lower edge of a band around it, or None.
        high: Upper edge, or None.
    """

    x: Sequence[float]
    y: Sequence[float]
    quantity: Quantity
    label: str = ""
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


@dataclass(frozen=True)
class Level:
    """A dashed baseline.

    Attributes:
        label: Its name.
        value: Its height.
        color: Its color: that of the writer or quantity that it shows.
    """

    label: str
    value: float
    color: str = MUTED


def draw_lines(axes: Axes, lines: Sequence[Line], *, levels: Sequence[Level] = ()) -> None:
    """Draw lines with their bands, each with its label and last value at its end.

    The y axis ends at the limits that all lines' quantities have in common.
    """
    ends: list[tuple[float, str, str]] = []
    for level in levels:
        axes.axhline(level.value, color=level.color, **DASHED, zorder=1)
        ends.append((level.value, f"{level.label} {_short(level.value)}", level.color))
    for line in lines:
        drawn = _draw_line(axes, line)
        color = line.quantity.color
        ends += [(drawn, f"{line.label} {_short(drawn)}".strip(), color)] if drawn is not None else []
    axes.margins(x=0.02, y=0.1)
    limit_axis(axes, _common([line.quantity for line in lines]))
    _label_ends(axes, ends)


def _common(quantities: Sequence[Quantity]) -> Quantity:
    """The range that holds for all quantities: unbounded where one of them is."""
    lows = [each.low for each in quantities]
    highs = [each.high for each in quantities]
    return Quantity(
        MUTED,
        low=min((low for low in lows if low is not None), default=None) if None not in lows else None,
        high=max((high for high in highs if high is not None), default=None) if None not in highs else None,
    )


def _draw_line(axes: Axes, line: Line) -> float | None:
    """Draw one line; return its last finite value, None without any."""
    x = np.asarray(line.x, dtype=float)
    y = np.asarray(line.y, dtype=float)
    color = line.quantity.color
    if line.low is not None and line.high is not None:
        axes.fill_between(x, line.low, line.high, color=color, alpha=0.16, linewidth=0)
    finite = y[np.isfinite(y)]
    # Points on the limit of an axis are drawn in full.
    axes.plot(x, y, color=color, linewidth=2, marker="o", markersize=5, solid_capstyle="round", clip_on=False)
    return float(finite[-1]) if len(finite) else None


def _label_ends(axes: Axes, ends: list[tuple[float, str, str]]) -> None:
    """Write labels beyond the right edge, each at the height of its value, moved apart where they would overlap."""
    low, high = axes.get_ylim()
    ends = sorted(ends)
    heights = _spread([float(np.clip((value - low) / (high - low), 0, 1)) for value, _, _ in ends])
    for height, (_, text, color) in zip(heights, ends, strict=True):
        axes.annotate(
            textwrap.fill(text, LABEL_WIDTH), (1.0, height), xycoords="axes fraction",
            xytext=(6, 0), textcoords="offset points", va="center", color=color, fontsize=10, fontweight="bold",
        )  # fmt: skip


def _spread(heights: list[float]) -> list[float]:
    """Ascending heights, moved apart by `LABEL_GAP` from the lowest up, then back down from the top edge."""
    placed: list[float] = []
    for height in heights:
        placed.append(max(height, placed[-1] + LABEL_GAP) if placed else height)
    ceiling = 1.0 + LABEL_GAP
    for index in reversed(range(len(placed))):
        ceiling = placed[index] = min(placed[index], ceiling - LABEL_GAP)
    return placed


def _short(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 0.001 or value == 0 else f"{value:.1e}"
