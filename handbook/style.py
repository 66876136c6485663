"""Shared plot style: few colors, labels at the ends of lines instead of legends.

Figures are made without pyplot: it needs a display, and its global state would leak between runs.
"""

from __future__ import annotations

import re
from typing import Any, Final, Literal

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator

from handbook.palette import GRID, INK, MUTED, PAPER, Quantity

DASHED: dict[str, Any] = {"linewidth": 1.2, "linestyle": (0, (4, 3))}
"""Style of baselines."""

TITLE_GAP: Final = 12
"""Smallest distance between the titles of neighboring axes, in points."""


def new_axes(rows: int = 1, columns: int = 1, *, width: float = 8.0, height: float = 4.2) -> tuple[Figure, list[Axes]]:
    """A figure of `width` × `height` inches with styled axes, row by row."""
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12, wspace=0.03, hspace=0.04)
    figure = Figure(figsize=(width, height), layout=layout, facecolor=PAPER)
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False)
    axes = [grid[row, column] for row in range(rows) for column in range(columns)]
    for each in axes:
        _style(each)
    return figure, axes


def label_axes(axes: Axes, *, title: str = "", x_label: str = "", y_label: str = "") -> None:
    """Set the title, left-aligned, and the axis labels."""
    axes.set_title(title, loc="left", color=INK, fontsize=12, fontweight="bold", pad=10)
    axes.set_xlabel(x_label, color=MUTED, fontsize=10)
    axes.set_ylabel(y_label, color=MUTED, fontsize=10)


def limit_axis(axes: Axes, quantity: Quantity, axis: Literal["x", "y"] = "y") -> None:
    """Cut an axis at the quantity's smallest and largest possible value: no negative shares or distances."""
    low, high = axes.get_xlim() if axis == "x" else axes.get_ylim()
    low = low if quantity.low is None else max(low, quantity.low)
    high = high if quantity.high is None else min(high, quantity.high)
    axes.set(**{f"{axis}lim": (low, high)})


def wrap_labels(figure: Figure) -> None:
    """Break titles and axis labels into lines that fit: a title up to the next axes, a label along its axis.

    matplotlib's layout reserves no width for titles, so that long ones would run into each other.
    """
    figure.draw_without_rendering()
    for axes in figure.axes:
        box = axes.get_window_extent()
        _wrap(axes.xaxis.label, box.width)
        _wrap(axes.yaxis.label, box.height)
    # The wrapped labels have moved the axes.
    figure.draw_without_rendering()
    for axes in figure.axes:
        room = _right_end(figure, axes) - TITLE_GAP * figure.dpi / 72 - axes.get_window_extent().x0
        for title in axes.findobj(Text):
            if isinstance(title, Text) and title.get_text() == axes.get_title(loc="left"):
                _wrap(title, room)


def _right_end(figure: Figure, axes: Axes) -> float:
    """Left edge of the next axes to the right, with their labels; else the figure's edge."""
    boxes = [other.get_tightbbox() for other in figure.axes
             if other.get_window_extent().x0 > axes.get_window_extent().x1]  # fmt: skip
    return min([float(figure.bbox.x1), *(float(box.x0) for box in boxes if box is not None)])


def _style(axes: Axes) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(MUTED)
    axes.grid(axis="y", color=GRID, linewidth=0.9)
    axes.set_axisbelow(True)
    axes.set_facecolor("none")
    axes.tick_params(axis="both", colors=MUTED, labelsize=10, length=0)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5))


def _wrap(text: Text, room: float) -> None:
    """Break a text after spaces and slashes into lines of at most `room` pixels, where its parts allow it."""
    lines = [""]
    for part in re.split(r"(?<=[ /])", text.get_text()):
        text.set_text((lines[-1] + part).rstrip())
        if _length(text) <= room or not lines[-1]:
            lines[-1] += part
        else:
            lines.append(part)
    text.set_text("\n".join(line.rstrip() for line in lines))


def _length(text: Text) -> float:
    box = text.get_window_extent()
    return box.height if text.get_rotation() == 90 else box.width
