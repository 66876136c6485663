"""Plots of results: calibration of a reward model, reward over KL, and figures with their confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes

from kedge.algorithm.statistics import Interval, calibration
from kedge.logs.plots.style import COLORS, DASHED, GRID, INK, Line, draw_lines, label_axes, new_axes, save_figure

__all__ = ["plot_calibration", "plot_frontier", "plot_intervals", "plot_overoptimization"]

KL_LABEL = "√KL to the reference (KL in nats per response)"


def plot_calibration(margins: Sequence[float], path: Path, *, num_bins: int = 10) -> Path:
    """How often a reward model is right, against how sure it is; on the diagonal it is honest.

    Args:
        margins: Score of the chosen answer less that of the rejected one, one per held-out pair.
        path: The PNG.
        num_bins: Bins of confidence between ½ and 1.
    """
    result = calibration(margins, num_bins=num_bins)
    total = sum(result.counts.tolist())
    accuracy = float((result.accuracy * result.counts).sum()) / total
    figure, (axes,) = new_axes(width=5.6, height=5.2)
    confidence, accuracy, counts = (figures.tolist() for figures in (result.confidence, result.accuracy, result.counts))
    total = sum(counts)
    axes.plot([0.5, 1], [0.5, 1], **DASHED)
    axes.plot(confidence, accuracy, color=COLORS[0], linewidth=1.6, alpha=0.6)
    areas = [40 + 700 * count / total for count in counts]
    axes.scatter(confidence, accuracy, s=areas, color=COLORS[0], alpha=0.85, zorder=3)
    axes.set_ylim(min(0.48, *accuracy) - 0.04, 1.03)
    right = sum(share * count for share, count in zip(accuracy, counts, strict=True)) / total
    axes.text(
        0.98, 0.04, f"accuracy {right:.3f}\ncalibration error {result.error:.3f}\n{total:,} pairs",
        transform=axes.transAxes, ha="right", color=INK, fontsize=10, linespacing=1.5,
    )  # fmt: skip
    label_axes(
        axes,
        title="Is the reward model as often right as it believes?",
        x_label="its confidence in its preference (area: share of pairs; dashed: honest)",
        y_label="share of pairs in which it is right",
    )
    return save_figure(figure, path)


def plot_frontier(
    kl: Sequence[float],
    curves: Mapping[str, Sequence[float]],
    path: Path,
    *,
    bands: Mapping[str, tuple[Sequence[float], Sequence[float]]] | None = None,
    levels: Mapping[str, float] | None = None,
    title: str = "What is gained for how far the policy moves",
    y_label: str = "",
) -> Path:
    """Rewards of one scale over √KL, the axis on which their course is simple.

    Args:
        kl: KL of each checkpoint to the reference, nats per response; an estimate below 0 counts as 0.
        curves: Figures of each checkpoint, by name.
        path: The PNG.
        bands: Lower and upper confidence limits of a curve, by its name.
        levels: Levels to compare with, by name.
        title: Above the plot.
        y_label: What the figures are.

    Source: Gao et al. (arXiv 2210.10760), figure 1.
    """
    figure, (axes,) = new_axes()
    limits = dict.fromkeys(curves, (None, None)) | dict(bands or {})
    lines = [Line(_roots(kl), figures, name, *limits[name], marked=True) for name, figures in curves.items()]
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
    """The reward that is trained on, and below it the judge who is not, over √KL; the judge's favourite is marked.

    Two axes, since the two are on different scales.

    Args:
        kl: KL of each checkpoint to the reference, nats per response; an estimate below 0 counts as 0.
        proxy: The trained reward model's mean score.
        gold: The gold or held-out judge's.
        path: The PNG.
        gold_band: Lower and upper confidence limits of the judge's.
        levels: Levels of the judge to compare with, by name.

    Source: Gao et al. (arXiv 2210.10760), figure 1.
    """
    figure, (above, below) = new_axes(2, 1, height=6.4)
    roots, (low, high) = _roots(kl), gold_band or (None, None)
    draw_lines(above, [Line(roots, proxy, marked=True)])
    label_axes(above, title="Proxy: the reward model that PPO maximises")
    draw_lines(below, [Line(roots, gold, low=low, high=high, marked=True)], levels=levels)
    label_axes(below, title="Gold: the judge that training never sees", x_label=KL_LABEL)
    best = max(range(len(gold)), key=lambda index: gold[index])
    below.plot(roots[best], gold[best], "o", markersize=11, markerfacecolor="none", markeredgecolor=COLORS[1])
    _write_above(below, "best", roots[best], gold[best], COLORS[1])
    return save_figure(figure, path)


def plot_intervals(
    panels: Mapping[str, Mapping[str, Interval]], path: Path, *, levels: Mapping[str, float] | None = None
) -> Path:
    """Figures with their confidence intervals, a panel per measure, a row per thing that was measured.

    Args:
        panels: Intervals by row name, by panel title.
        path: The PNG.
        levels: A level to compare with, by panel title (½ for a win rate).
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
