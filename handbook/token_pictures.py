"""The figures of docs/token.md, in the style of kedge's plots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from handbook.lines import Level, Line, draw_lines
from handbook.palette import INK, MARK, MUTED, POLICY, RETURN, SCORE, VALUE
from handbook.style import DASHED, label_axes, new_axes
from handbook.svg import save_svg
from handbook.token import TokenUpdate

OTHERS = POLICY
FOLLOWED = MARK


def draw_pictures(update: TokenUpdate, folder: Path) -> None:
    """Write every figure as SVG."""
    for name, draw in PICTURES.items():
        save_svg(draw(update), folder / f"{name}.svg")


def draw_choices(update: TokenUpdate) -> Figure:
    """The most likely tokens at the token's position."""
    choices = update.record["choices"][::-1]
    figure, [axes] = new_axes(width=7.2, height=2.9)
    names = [name.strip() for name, _ in choices]
    probabilities = [value for _, value in choices]
    sampled = update.tokens[update.token].strip()
    bars = axes.barh(
        range(len(names)), probabilities, color=[FOLLOWED if name == sampled else OTHERS for name in names], height=0.66
    )
    axes.bar_label(bars, [f"{100 * value:.1f} %" for value in probabilities], padding=5, color=INK, fontsize=10)
    axes.grid(visible=False)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.set_yticks(range(len(names)), names, color=INK)
    label_axes(axes, title=f"Next-token probabilities after “{_before(update)}”")
    return figure


def draw_rewards(update: TokenUpdate) -> Figure:
    """KL and reward of each token."""
    figure, [above, below] = new_axes(2, width=9.0, height=5.2)
    _bars(above, update, update.of(update.kl))
    label_axes(above, title="KL to the reference", y_label="nats")
    above.set_xticklabels([])
    _bars(below, update, update.of(update.rewards))
    label_axes(below, title="Reward: KL penalty, and the score at the end", y_label="score")
    return figure


def draw_values(update: TokenUpdate) -> Figure:
    """The critic's value before each token, and its target."""
    figure, [axes] = new_axes(width=9.0, height=3.9)
    places = range(len(update.tokens))
    lines = [
        Line(places, update.of(update.values), VALUE, "value"),
        Line(places, update.of(update.returns), RETURN, "return"),
    ]
    draw_lines(axes, lines, levels=[Level("score", update.score, SCORE.color)])
    _name_tokens(axes, update)
    label_axes(axes, title="The critic's value before each token, and its target, the return", y_label="score")
    return figure


def draw_advantage(update: TokenUpdate) -> Figure:
    """The TD residuals, and the contribution of each to the token's advantage."""
    figure, [above, below] = new_axes(2, width=9.0, height=5.2)
    residuals = np.array(update.of(update.residuals))
    _bars(above, update, residuals)
    label_axes(above, title="TD residual of each token", y_label="δ, score")
    above.set_xticklabels([])
    decay = update.setting("gamma") * update.setting("gae_lambda")
    later = np.arange(len(residuals)) - update.token
    contributions = np.where(later >= 0, residuals * decay ** np.maximum(later, 0), 0.0)
    _bars(below, update, contributions)
    name = update.tokens[update.token].strip()
    total = contributions.sum()
    title = f"Contribution to the advantage of “{name}”: {total:.3f} in total"
    label_axes(below, title=title, y_label="(γλ)ˡ·δ, score")
    return figure


def draw_clip(update: TokenUpdate) -> Figure:
    """The clipped objective at the token's advantage, with the ratio at the start and after each epoch."""
    figure, [axes] = new_axes(width=7.2, height=4.2)
    advantage = update.at(update.advantages)
    limit = 1 + update.setting("clip_range")
    ratios = [1.0, *(float(epoch[update.row, update.token]) for epoch in update.ratios)]
    places = np.linspace(0.8, max(ratios) + 0.2, 200)
    axes.plot(places, places * advantage, color=MUTED, **DASHED)
    axes.plot(places, np.minimum(places, limit) * advantage, color=OTHERS, linewidth=2)
    objectives = [min(ratio, limit) * advantage for ratio in ratios]
    axes.plot(ratios, objectives, "o", color=FOLLOWED, markersize=7)
    for epoch, (ratio, objective) in enumerate(zip(ratios, objectives, strict=True)):
        text, side, offset = (f"after epoch {epoch}", "left", (8, -22)) if epoch else ("at the start", "right", (-8, 4))
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


PICTURES: dict[str, Callable[[TokenUpdate], Figure]] = {
    "choices": draw_choices,
    "rewards": draw_rewards,
    "values": draw_values,
    "advantage": draw_advantage,
    "clip": draw_clip,
}


def _before(update: TokenUpdate) -> str:
    return "… " + "".join(update.tokens[max(0, update.token - 6) : update.token]).strip()


def _bars(axes: Axes, update: TokenUpdate, heights: Sequence[float] | np.ndarray) -> None:
    colors = [FOLLOWED if place == update.token else OTHERS for place in range(len(heights))]
    axes.bar(range(len(heights)), heights, color=colors, width=0.7)
    axes.axhline(0, color=MUTED, linewidth=0.8)
    _name_tokens(axes, update)


def _name_tokens(axes: Axes, update: TokenUpdate) -> None:
    names = [name.strip() for name in update.tokens]
    axes.set_xticks(range(len(names)), names, rotation=60, ha="right", rotation_mode="anchor", fontsize=9)
    for place, label in enumerate(axes.get_xticklabels()):
        label.set_color(FOLLOWED if place == update.token else MUTED)
    axes.margins(x=0.01)
