"""Curves of the held-out score over FLOPs and over sampled tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.study.statistics import interquartile_mean, with_interval
from bench.study.unit import Budget, Outcome
from handbook.palette import POLICY, REFERENCES, START
from handbook.style import label_axes, new_axes

COLORS: Final = {
    "ppo": START,
    "ppo-lambda-1": "#b83280",
    "ppo-stack": POLICY,
    "ppo-pretrained": "#0e7c8f",
    "rloo": "#b7791f",
    "grpo": REFERENCES,
    "reinforce++": "#8656b8",
}
NUM_POINTS: Final = 15
AXES: Final = {"flops": "FLOPs", "tokens": "sampled tokens"}


def draw_curves(compared: Mapping[str, Sequence[Outcome]], budget: Budget) -> Figure:
    """Interquartile means over the seeds with their intervals, an algorithm per line, up to either budget.

    Args:
        compared: The runs of each algorithm.
        budget: The ends of the two axes.
    """
    figure, panels = new_axes(1, 2, width=10.0, height=4.2)
    for axes, (axis, label) in zip(panels, AXES.items(), strict=True):
        places = np.linspace(0.0, getattr(budget, axis), NUM_POINTS)
        for name, outcomes in compared.items():
            _draw(axes, name, outcomes, axis, places)
        label_axes(axes, title=f"At equal {label}", x_label=label, y_label="held-out score")
    panels[0].legend(frameon=False, loc="lower right")
    return figure


def _draw(axes: Axes, name: str, outcomes: Sequence[Outcome], axis: str, places: np.ndarray) -> None:
    scores = [[[each.score_at(axis, float(place)) for each in outcomes]] for place in places]
    found = [with_interval(interquartile_mean, each) for each in scores]
    color = COLORS[name]
    axes.plot(places, [each.value for each in found], color=color, linewidth=1.8, label=name)
    axes.fill_between(
        places, [each.low for each in found], [each.high for each in found], color=color, alpha=0.15, linewidth=0
    )
