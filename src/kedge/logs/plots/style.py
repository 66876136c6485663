"""Shared plot style: light axes, few colors, labels at the ends of lines instead of legends.

Figures are made without pyplot, whose global state would leak between runs and needs a display.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

__all__ = ["COLORS", "DASHED", "GRID", "INK", "MUTED", "Line", "draw_lines", "label_axes", "new_axes", "save_figure"]

INK, MUTED, GRID = "#1f2933", "#66727f", "#e4e7eb"
COLORS = ("#1f6fb4", "#d1495b", "#2b8a6e", "#8656b8", "#b7791f", "#4a5568")
"""Distinguishable with the common forms of color blindness and in grayscale."""

DASHED: dict[str, Any] = {"color": MUTED, "linewidth": 1.2, "linestyle": (0, (4, 3))}
"""Style of baselines."""

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
        label: Text at its end, in front of the last value; may be empty.
        low: Lower edge of a band around it, or None.
        high: Upper edge, or None.
    """

    x: Sequence[float]
    y: Sequence[float]
    label: str = ""
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


def new_axes(rows: int = 1, columns: int = 1, *, width: float = 8.0, height: float = 4.2) -> tuple[Figure, list[Axes]]:
    """A figure of `width` × `height` inches with styled axes, row by row."""
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12, wspace=0.03, hspace=0.04)
    figure = Figure(figsize=(width, height), layout=layout, facecolor="white")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False)
    axes = [grid[row, column] for row in range(rows) for column in range(columns)]
    for each in axes:
        _style(each)
    return figure, axes


def save_figure(figure: Figure, path: Path) -> Path:
    """Write a PNG; its folder is created if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Software": None})
    return path


def label_axes(axes: Axes, *, title: str = "", x_label: str = "", y_label: str = "") -> None:
    """Set the title, left-aligned, and the axis labels."""
    axes.set_title(title, loc="left", color=INK, fontsize=12, fontweight="bold", pad=10)
    axes.set_xlabel(x_label, color=MUTED, fontsize=10)
    axes.set_ylabel(y_label, color=MUTED, fontsize=10)


def draw_lines(axes: Axes, lines: Sequence[Line], *, levels: Mapping[str, float] | None = None) -> None:
    """Draw lines with their bands, each with its label and last value at its end.

    Args:
        axes: Axes to draw on.
        lines: Lines to draw.
        levels: Dashed baselines, by label.
    """
    ends: list[tuple[float, str, str]] = []
    for label, level in (levels or {}).items():
        axes.axhline(level, **DASHED, zorder=1)
        ends.append((level, f"{label} {_short(level)}", MUTED))
    for index, line in enumerate(lines):
        color = COLORS[index % len(COLORS)]
        drawn = _draw_line(axes, line, color)
        ends += [(drawn, f"{line.label} {_short(drawn)}".strip(), color)] if drawn is not None else []
    axes.margins(x=0.02, y=0.1)
    _label_ends(axes, ends)


def _style(axes: Axes) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(MUTED)
    axes.grid(axis="y", color=GRID, linewidth=0.9)
    axes.set_axisbelow(True)
    axes.tick_params(axis="both", colors=MUTED, labelsize=10, length=0)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5))


def _draw_line(axes: Axes, line: Line, color: str) -> float | None:
    """Draw one line; return its last finite value, None if it has none."""
    x, y = np.asarray(line.x, dtype=float), np.asarray(line.y, dtype=float)
    if line.low is not None and line.high is not None:
        axes.fill_between(x, line.low, line.high, color=color, alpha=0.16, linewidth=0)
    finite = y[np.isfinite(y)]
    axes.plot(x, y, color=color, linewidth=2, marker="o", markersize=5, solid_capstyle="round")
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
