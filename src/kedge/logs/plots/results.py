"""Plots of results: reward over KL, and values with their confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kedge.logs.plots.lines import Level, Line, draw_lines
from kedge.logs.plots.palette import GRID, INK, KL, MARK, MUTED, QUALITY, QUANTITIES, SCORE, Quantity
from kedge.logs.plots.style import DASHED, label_axes, limit_axis, new_axes, save_figure
from kedge.system.intervals import Interval

__all__ = ["Panel", "Row", "draw_intervals", "draw_overoptimization", "plot_frontier"]

KL_LABEL = "√KL to the reference (KL in nats per response)"


@dataclass(frozen=True)
class Row:
    """One interval of a panel: its label, values, and the color of the writer that it belongs to."""

    label: str
    interval: Interval
    color: str


@dataclass(frozen=True)
class Panel:
    """One measure of several subjects.

    Attributes:
        title: Name of the measure.
        quantity: What it is; decides the limits of the axis.
        rows: The subjects, from top to bottom.
        level: Dashed baseline (½ for a win rate), or None.
    """

    title: str
    quantity: Quantity
    rows: Sequence[Row]
    level: float | None = None


def plot_frontier(
    kl: Sequence[float],
    curves: Mapping[str, Sequence[float]],
    path: Path,
    *,
    bands: Mapping[str, tuple[Sequence[float], Sequence[float]]] | None = None,
    title: str = "Reward gained over distance moved",
    y_label: str = "",
) -> Path:
    """Plot rewards on one scale over √KL.

    Args:
        kl: KL of each checkpoint to the reference, nats per response; negative estimates count as 0.
        curves: Values of each checkpoint, by the name of the quantity (a key of `QUANTITIES`).
        path: The PNG.
        bands: Lower and upper confidence limits, by curve name.
        title: Plot title.
        y_label: Label of the y axis.

    Source: Gao et al. (arXiv 2210.10760), figure 1.
    """
    figure, (axes,) = new_axes()
    limits = dict.fromkeys(curves, (None, None)) | dict(bands or {})
    draw_lines(axes, [Line(_roots(kl), values, QUANTITIES[name], name, *limits[name])
                      for name, values in curves.items()])  # fmt: skip
    limit_axis(axes, KL, "x")
    label_axes(axes, title=title, x_label=KL_LABEL, y_label=y_label)
    return save_figure(figure, path)


def draw_overoptimization(
    kl: Sequence[float],
    proxy: Sequence[float],
    gold: Sequence[Interval],
    *,
    levels: Sequence[Level] = (),
) -> Figure:
    """Draw the proxy reward above the gold judge, over √KL, with the judge's best checkpoint marked.

    Two axes, because the two are on different scales.

    Args:
        kl: KL of each checkpoint to the reference, nats per response; negative estimates count as 0.
        proxy: Mean score of the trained reward model.
        gold: Mean quality by the gold judge, with its confidence interval.
        levels: Baselines of the judge.

    Source: Gao et al. (arXiv 2210.10760), figure 1.
    """
    figure, (above, below) = new_axes(2, 1, width=6.8, height=5.6)
    roots, values = _roots(kl), [each.value for each in gold]
    draw_lines(above, [Line(roots, proxy, SCORE)])
    label_axes(above, title="Proxy: the reward model that PPO maximizes", y_label="score")
    judged = Line(roots, values, QUALITY, low=[each.low for each in gold], high=[each.high for each in gold])
    draw_lines(below, [judged], levels=levels)
    label_axes(below, title="Gold: the judge that training never uses", x_label=KL_LABEL, y_label="quality, 0 to 1")
    for axes in (above, below):
        limit_axis(axes, KL, "x")
    best = max(range(len(values)), key=lambda index: values[index])
    below.plot(roots[best], values[best], "o", markersize=11, markerfacecolor="none", markeredgecolor=MARK)
    _write_above(below, "best", roots[best], values[best], MARK)
    return figure


def draw_intervals(panels: Sequence[Panel]) -> Figure:
    """Draw values with their confidence intervals: one panel per measure, one row per subject."""
    num_rows = max(len(panel.rows) for panel in panels)
    figure, grid = new_axes(1, len(panels), width=4.8 * len(panels), height=1.5 + 0.5 * num_rows)
    for axes, panel in zip(grid, panels, strict=True):
        if panel.level is not None:
            axes.axvline(panel.level, color=MUTED, **DASHED)
        for height, row in enumerate(panel.rows):
            _draw_interval(axes, row.interval, height, row.color)
        axes.grid(visible=False)
        axes.grid(axis="x", color=GRID)
        axes.set_yticks(range(len(panel.rows)), [row.label for row in panel.rows], color=INK, fontsize=11)
        axes.set_ylim(num_rows - 0.5, -0.7)
        axes.margins(x=0.12)
        limit_axis(axes, panel.quantity, "x")
        label_axes(axes, title=panel.title)
    return figure


def _draw_interval(axes: Axes, interval: Interval, height: float, color: str) -> None:
    axes.plot([interval.low, interval.high], [height] * 2, color=color, linewidth=3, alpha=0.45, clip_on=False)
    axes.plot(interval.value, height, "o", color=color, markersize=8, clip_on=False)
    _write_above(axes, f"{interval.value:.2f}", interval.value, height, color)


def _write_above(axes: Axes, text: str, x: float, y: float, color: str) -> None:
    axes.annotate(
        text, (x, y), xytext=(0, 9), textcoords="offset points", ha="center",
        color=color, fontsize=10, fontweight="bold",
    )  # fmt: skip


def _roots(kl: Sequence[float]) -> list[float]:
    return [math.sqrt(max(0.0, value)) for value in kl]
