"""The course of a training run as PNG files: one plot per subject, and one overview."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from kedge.logs.plots.style import Line, draw_lines, label_axes, new_axes, save_figure

__all__ = ["plot_curves", "plot_training"]


@dataclass(frozen=True)
class Panel:
    """A plot of metrics that belong together.

    Attributes:
        file: name of the PNG, without its ending.
        title: what is shown, with its unit.
        metrics: labels by the names of the metrics.
        level: a level to compare with, or None.
        floor: figures below are drawn at it: one wild value must not flatten the rest.
    """

    file: str
    title: str
    metrics: Mapping[str, str]
    level: float | None = None
    floor: float | None = None


PANELS = (
    Panel("reward", "Score per response", {"reward/score_mean": ""}),
    Panel("kl", "KL to the reference (nats per response)", {"objective/kl": ""}, level=0.0),
    Panel("entropy", "Entropy (nats per token)", {"policy/entropy": ""}),
    Panel(
        "clip_fraction", "Clipped share of tokens", {"policy/clip_fraction": "policy", "value/clip_fraction": "value"}
    ),
    Panel("explained_variance", "Explained variance of the critic", {"value/explained_variance": ""}, 0.0, floor=-1.0),
    Panel("approx_kl", "KL of an update (nats per token)", {"policy/approx_kl": ""}),
    Panel("policy_loss", "Policy loss", {"policy/loss": ""}, level=0.0),
    Panel("value_loss", "Value loss", {"value/loss": ""}),
    Panel("gradient_norm", "Gradient norm before clipping", {"policy/grad_norm": ""}),
    Panel("response_length", "Response length (tokens)", {"response/length": ""}),
    Panel("eos_rate", "Share of responses that stop", {"response/eos_rate": ""}),
    Panel("loss", "Loss (nats)", {"loss": "train", "eval/loss": "held out"}),
    Panel(
        "accuracy",
        "Accuracy",
        {
            "accuracy": "train",
            "eval/accuracy": "held out",
            "token_accuracy": "train, tokens",
            "eval/token_accuracy": "held out, tokens",
        },
    ),
)
OVERVIEW_COLUMNS = 3


def plot_training(rows: Sequence[Mapping[str, Any]], folder: Path, *, x_label: str = "update") -> list[Path]:
    """Draw what a run's metrics hold: `plots/*.png`, and all of it together in `plots/overview.png`.

    Args:
        rows: Rows of `metrics.jsonl`; figures that are absent or null leave a gap.
        folder: The run's folder.
        x_label: What a row stands for.

    Returns:
        The files written; none where no known metric has a figure.
    """
    drawn = [(panel, lines) for panel in PANELS if (lines := _lines(panel, rows))]
    paths = []
    for panel, lines in drawn:
        figure, (axes,) = new_axes(whole_x=True)
        _draw(axes, panel, lines, x_label)
        paths.append(save_figure(figure, folder / "plots" / f"{panel.file}.png"))
    if drawn:
        paths.append(_overview(drawn, folder / "plots" / "overview.png", x_label))
    return paths


def plot_curves(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    path: Path,
    *,
    title: str = "",
    x_label: str = "",
    y_label: str = "",
    levels: Mapping[str, float] | None = None,
) -> Path:
    """Draw named curves, each a pair of positions and figures, with dashed levels to compare with."""
    figure, (axes,) = new_axes()
    lines = [Line(x, y, label, marked=len(x) < 30) for label, (x, y) in curves.items()]
    draw_lines(axes, lines, levels=levels)
    label_axes(axes, title=title, x_label=x_label, y_label=y_label)
    return save_figure(figure, path)


def _lines(panel: Panel, rows: Sequence[Mapping[str, Any]]) -> list[Line]:
    """The panel's lines, those without a single figure left out."""
    lines = []
    for metric, label in panel.metrics.items():
        points = [(row["update"], float(row[metric])) for row in rows if row.get(metric) is not None]
        points = [(update, max(value, panel.floor or -math.inf)) for update, value in points if math.isfinite(value)]
        if points:
            x, y = zip(*points, strict=True)
            lines.append(Line(x, y, label, marked=len(points) < len(rows) and len(points) <= 30))
    return lines


def _draw(axes: Axes, panel: Panel, lines: Sequence[Line], x_label: str) -> None:
    draw_lines(axes, lines, levels=None if panel.level is None else {"": panel.level})
    label_axes(axes, title=panel.title, x_label=x_label)


def _overview(drawn: Sequence[tuple[Panel, Sequence[Line]]], path: Path, x_label: str) -> Path:
    columns = min(OVERVIEW_COLUMNS, len(drawn))
    rows = math.ceil(len(drawn) / columns)
    figure, axes = new_axes(rows, columns, width=4.6 * columns, height=3.0 * rows, whole_x=True)
    for each, (panel, lines) in zip(axes, drawn, strict=False):
        last_row = axes.index(each) >= len(drawn) - columns
        _draw(each, panel, lines, x_label if last_row else "")
    for unused in axes[len(drawn) :]:
        unused.set_visible(False)
    return save_figure(figure, path)
