"""PNG plots of results: reward over KL, and values with their confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes

from kedge.algorithm.statistics import Interval
from kedge.logs.plots.style import COLORS, DASHED, GRID, INK, Line, draw_lines, label_axes, new_axes, save_figure

__all__ = ["plot_frontier", "plot_intervals", "plot_overoptimization"]

KL_LABEL = "√KL to the reference (KL in nats per response)"


def plot_frontier(
    kl: Sequence[float],
    curves: Mapping[str, Sequence[float]],
    path: Path,
    *,
    bands: Mapping[str, tuple[Sequence[float], Sequence[float]]] | None = None,
    levels: Mapping[str, float] | None = None,
    title: str = "Reward gained over distance moved",
    y_label: str = "",
) -> Path:
    """Plot rewards on one scale over √KL.

    Args:
        kl: KL of each checkpoint to the reference, nats per response; negative estimates count as 0.
        curves: Values of each checkpoint, by name.
        path: The PNG.
        bands: Lower and upper confidence limits, by curve name.
        levels: Baselines, by name.
        title: Plot title.
        y_label: Label of the y axis.

    Source: Gao et al. (arXiv 2210.10760), figure 1.
    """
    figure, (axes,) = new_axes()
    limits = dict.fromkeys(curves, (None, None)) | dict(bands or {})
    lines = [Line(_roots(kl), values, name, *limits[name]) for name, values in curves.items()]
    draw_lines(axes, lines, levels=levels)
    label_axes(axes, title=title, x_label=KL_LABEL, y_label=y_label)
    return save_figure(figure, path)


def plot_overoptimization(
    kl: Sequence[float],
    proxy: Sequence[float],
    gold: Sequence[float],
    path: Path,
    *,
    gold_band: tuple[Sequence[float], Sequence[float]] | None = None,
    levels: Mapping[str, float] | None = None,
) -> Path:
    """Plot the proxy reward above the gold judge, over √KL, with the judge's best checkpoint marked.

    Two axes, because the two are on different scales.

    Args:
        kl: KL of each checkpoint to the reference, nats per response; negative estimates count as 0.
        proxy: Mean score of the trained reward model.
        gold: Mean score of the gold or held-out judge.
        path: The PNG.
        gold_band: Lower and upper confidence limits of `gold`.
        levels: Baselines of the judge, by name.

    Source: Gao et al. (arXiv 2210.10760), figure 1.
    """
    figure, (above, below) = new_axes(2, 1, height=6.4)
    roots, (low, high) = _roots(kl), gold_band or (None, None)
    draw_lines(above, [Line(roots, proxy)])
    label_axes(above, title="Proxy: the reward model PPO maximizes")
    draw_lines(below, [Line(roots, gold, low=low, high=high)], levels=levels)
    label_axes(below, title="Gold: the judge that training never uses", x_label=KL_LABEL)
    best = max(range(len(gold)), key=lambda index: gold[index])
    below.plot(roots[best], gold[best], "o", markersize=11, markerfacecolor="none", markeredgecolor=COLORS[1])
    _write_above(below, "best", roots[best], gold[best], COLORS[1])
    return save_figure(figure, path)


def plot_intervals(
    panels: Mapping[str, Mapping[str, Interval]], path: Path, *, levels: Mapping[str, float] | None = None
) -> Path:
    """Plot values with their confidence intervals: one panel per measure, one row per subject.

    Args:
        panels: Intervals by row name, by panel title.
        path: The PNG.
        levels: Baseline by panel title (½ for a win rate).
    """
    num_rows = max(len(rows) for rows in panels.values())
    figure, grid = new_axes(1, len(panels), width=4.8 * len(panels), height=1.3 + 0.5 * num_rows)
    for axes, (title, rows) in zip(grid, panels.items(), strict=True):
        if levels and title in levels:
            axes.axvline(levels[title], **DASHED)
        for height, interval in enumerate(rows.values()):
            _draw_interval(axes, interval, height, COLORS[height % len(COLORS)])
        axes.grid(visible=False)
        axes.grid(axis="x", color=GRID)
        axes.set_yticks(range(len(rows)), list(rows), color=INK, fontsize=11)
        axes.set_ylim(len(rows) - 0.5, -0.7)
        axes.margins(x=0.12)
        label_axes(axes, title=title)
    return save_figure(figure, path)


def _draw_interval(axes: Axes, interval: Interval, height: float, color: str) -> None:
    axes.plot([interval.low, interval.high], [height] * 2, color=color, linewidth=3, alpha=0.45)
    axes.plot(interval.value, height, "o", color=color, markersize=8)
    _write_above(axes, f"{interval.value:.2f}", interval.value, height, color)


def _write_above(axes: Axes, text: str, x: float, y: float, color: str) -> None:
    axes.annotate(
        text, (x, y), xytext=(0, 9), textcoords="offset points", ha="center",
        color=color, fontsize=10, fontweight="bold",
    )  # fmt: skip


def _roots(kl: Sequence[float]) -> list[float]:
    return [math.sqrt(max(0.0, value)) for value in kl]
