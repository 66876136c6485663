"""The pictures of one token's way, in the style of the run's own plots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from handbook.token import TokenStory
from kedge.logs.plots.style import COLORS, DASHED, INK, MUTED, Line, draw_lines, label_axes, new_axes

__all__ = ["PICTURES", "draw_pictures"]

USUAL, FOLLOWED = COLORS[0], COLORS[1]
SVG: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "kedge", "font.family": ["DejaVu Sans", "sans-serif"]}
"""Texts stay texts, and the same figures give the same file."""


def draw_pictures(story: TokenStory, folder: Path) -> None:
    """Write every picture as SVG."""
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(SVG):
        for name, draw in PICTURES.items():
            draw(story).savefig(folder / f"{name}.svg", metadata={"Date": None, "Creator": None})


def draw_choices(story: TokenStory) -> Figure:
    """What the policy could have said in the token's place."""
    choices = story.record["choices"][::-1]
    figure, [axes] = new_axes(width=7.2, height=2.9)
    names, shares = [name.strip() for name, _ in choices], [share for _, share in choices]
    said = story.tokens[story.token].strip()
    bars = axes.barh(
        range(len(names)), shares, color=[FOLLOWED if name == said else USUAL for name in names], height=0.66
    )
    axes.bar_label(bars, [f"{100 * share:.1f} %" for share in shares], padding=5, color=INK, fontsize=10)
    axes.grid(visible=False)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.set_yticks(range(len(names)), names, color=INK)
    label_axes(axes, title=f"What could come after “{_before(story)}”")
    return figure


def draw_rewards(story: TokenStory) -> Figure:
    """What each token pays for leaving the reference, and what it gets."""
    figure, [above, below] = new_axes(2, width=9.0, height=5.2)
    _bars(above, story, story.of(story.kl))
    label_axes(above, title="KL to the reference", y_label="nats")
    above.set_xticklabels([])
    _bars(below, story, story.of(story.rewards))
    label_axes(below, title="Reward: the score at the end, less what the KL costs", y_label="score")
    return figure


def draw_forecast(story: TokenStory) -> Figure:
    """The critic's forecast before each token, and what it is taught."""
    figure, [axes] = new_axes(width=9.0, height=3.9)
    places = range(len(story.tokens))
    lines = [
        Line(places, story.of(story.values), label="value"),
        Line(places, story.of(story.returns), label="return"),
    ]
    draw_lines(axes, lines, levels={"score": story.score})
    _name_tokens(axes, story)
    label_axes(axes, title="The critic's forecast before each token, and what it is taught", y_label="score")
    return figure


def draw_advantage(story: TokenStory) -> Figure:
    """The surprises, and how much of each reaches the followed token."""
    figure, [above, below] = new_axes(2, width=9.0, height=5.2)
    residuals = np.array(story.of(story.residuals))
    _bars(above, story, residuals)
    label_axes(above, title="The surprise at each token", y_label="δ, score")
    above.set_xticklabels([])
    fading = story.setting("gamma") * story.setting("gae_lambda")
    later = np.arange(len(residuals)) - story.token
    reached = np.where(later >= 0, residuals * fading ** np.maximum(later, 0), 0.0)
    _bars(below, story, reached)
    label_axes(
        below,
        title=f"What of it reaches “{story.tokens[story.token].strip()}”: {reached.sum():.3f} in all",
        y_label="(γλ)ˡ·δ, score",
    )
    return figure


def draw_clip(story: TokenStory) -> Figure:
    """The clipped objective at the token's advantage, with the ratio that each epoch began with."""
    figure, [axes] = new_axes(width=7.2, height=4.2)
    advantage, limit = story.at(story.advantages), 1 + story.setting("clip_range")
    ratios = [1.0, *(float(epoch[story.row, story.token]) for epoch in story.ratios)]
    places = np.linspace(0.8, max(ratios) + 0.2, 200)
    axes.plot(places, places * advantage, **DASHED)
    axes.plot(places, np.minimum(places, limit) * advantage, color=USUAL, linewidth=2)
    objectives = [min(ratio, limit) * advantage for ratio in ratios]
    axes.plot(ratios, objectives, "o", color=FOLLOWED, markersize=7)
    for epoch, (ratio, objective) in enumerate(zip(ratios, objectives, strict=True)):
        text, side, offset = (f"after epoch {epoch}", "left", (8, -22)) if epoch else ("at first", "right", (-8, 4))
        axes.annotate(
            f"ρ = {ratio:.2f}\n{text}", (ratio, objective), xytext=offset, textcoords="offset points", ha=side,
            color=FOLLOWED, fontsize=9,
        )  # fmt: skip
    axes.annotate("without the clip", (places[-1], places[-1] * advantage), xytext=(-8, 0), textcoords="offset points",
                  ha="right", color=MUTED, fontsize=10)  # fmt: skip
    axes.set_ylim(0.75 * advantage, places[-1] * advantage * 1.03)
    label_axes(
        axes, title=f"The objective of a token with A = {advantage:.2f}", x_label="ratio ρ", y_label="min(ρA, clip(ρ)A)"
    )
    return figure


PICTURES: dict[str, Callable[[TokenStory], Figure]] = {
    "choices": draw_choices,
    "rewards": draw_rewards,
    "forecast": draw_forecast,
    "advantage": draw_advantage,
    "clip": draw_clip,
}


def _before(story: TokenStory) -> str:
    return "… " + "".join(story.tokens[max(0, story.token - 6) : story.token]).strip()


def _bars(axes: Axes, story: TokenStory, heights: Sequence[float] | np.ndarray) -> None:
    colors = [FOLLOWED if place == story.token else USUAL for place in range(len(heights))]
    axes.bar(range(len(heights)), heights, color=colors, width=0.7)
    axes.axhline(0, color=MUTED, linewidth=0.8)
    _name_tokens(axes, story)


def _name_tokens(axes: Axes, story: TokenStory) -> None:
    names = [name.strip() for name in story.tokens]
    axes.set_xticks(range(len(names)), names, rotation=60, ha="right", rotation_mode="anchor", fontsize=9)
    for place, label in enumerate(axes.get_xticklabels()):
        label.set_color(FOLLOWED if place == story.token else MUTED)
    axes.margins(x=0.01)
