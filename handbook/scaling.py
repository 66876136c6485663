"""The computed tables and pictures of docs/ranks.md and bench/cluster/RESULTS.md; their text is written by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from bench.cluster import (
    CARDS,
    KINDS,
    NUMBERS,
    Layout,
    UpdateTime,
    Workload,
    cheapest,
    checked_syncs,
    checked_updates,
    layout_name,
    sweep,
    typical_shape,
    update_time,
)
from bench.tables import renewed
from handbook.palette import INK, MARK, MUTED, POLICY, REFERENCES, SCORE, START, VALUE
from handbook.style import label_axes, new_axes
from handbook.svg import save_svg

SIZES: Final = (1.5e9, 8e9, 32e9, 70e9)
SHOWN: Final = tuple(number for number in NUMBERS if number >= 4)
PHASES: Final = (
    ("rollout", POLICY),
    ("passes", SCORE.color),
    ("training", REFERENCES),
    ("weight sync", MARK),
    ("other", MUTED),
)


def example(size: float = 8e9) -> Workload:
    """The pages' update: 1,024 responses of 700 tokens on average to prompts of 512, four epochs."""
    return Workload(typical_shape(size), 1024, 512, 1024, 700, 2048, epochs=4, critic="shared")


@cache
def best_of(size: float, cards: int, *, synchronous: bool = False) -> UpdateTime | None:
    """The cheapest layout of this number of H100 for a policy of this size."""
    updates = sweep(example(size), CARDS["H100"], (cards,))
    return cheapest([each for each in updates if not (synchronous and each.layout.staleness)])


def with_scaling(text: str) -> str:
    """The page with those tables renewed that it has markers for."""
    for name, table in TABLES.items():
        if f"<!-- {name}:begin -->" in text:
            text = renewed(text, name, table())
    return text


def draw_scaling(folder: Path) -> None:
    """Write every picture as SVG."""
    for name, draw in SCALING_PICTURES.items():
        save_svg(draw(), folder / f"{name}.svg")


def draw_phases() -> Figure:
    """Seconds of an update's phases over the number of cards, synchronous layouts, as shares."""
    figure, [axes] = new_axes(width=9.0, height=4.2)
    updates = [each for number in SHOWN if (each := best_of(8e9, number, synchronous=True))]
    places = range(len(updates))
    below = [0.0] * len(updates)
    for name, color in PHASES:
        shares = [100 * _phase(each, name) / each.seconds for each in updates]
        axes.bar(places, shares, bottom=below, color=color, width=0.72, label=name)
        below = [low + share for low, share in zip(below, shares, strict=True)]
    for place, each in zip(places, updates, strict=True):
        axes.annotate(f"{_short(each.seconds)} s", (place, 101), ha="center", color=INK, fontsize=9)
    axes.set_xticks(places, [str(each.layout.cards) for each in updates])
    axes.set_ylim(0, 108)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=10, labelcolor=INK)
    label_axes(axes, title="An update of an 8B policy, synchronous", x_label="H100", y_label="% of the update's time")
    return figure


def draw_prices() -> Figure:
    """Seconds per update over the number of cards, for each size."""
    figure, [axes] = new_axes(width=9.0, height=4.6)
    for size, color in zip(SIZES, (REFERENCES, POLICY, VALUE.color, MARK), strict=True):
        updates = [each for number in NUMBERS if (each := best_of(size, number))]
        numbers = [each.layout.cards for each in updates]
        seconds = [each.seconds for each in updates]
        axes.loglog(numbers, seconds, "o-", color=color, linewidth=2, markersize=5)
        axes.annotate(f"{size / 1e9:g}B", (numbers[0], seconds[0]), xytext=(-8, 4), textcoords="offset points",
                      ha="right", color=color, fontsize=10)  # fmt: skip
    _number_cards(axes)
    axes.set_xlim(0.7, 640)
    label_axes(axes, title="The fastest update on a number of cards", x_label="H100", y_label="seconds per update")
    return figure


def draw_sides() -> Figure:
    """Synchronous and one step off over the share of the cards that sample, 64 cards."""
    figure, [axes] = new_axes(width=9.0, height=4.2)
    work = example()
    shares = [8, 16, 24, 32, 40, 48, 56]
    for staleness, color, name in ((0, START, "apart, synchronous"), (1, POLICY, "one step off")):
        seconds = [update_time(work, Layout(CARDS["H100"], 64, share, 4, staleness)).seconds for share in shares]
        axes.plot(shares, seconds, "o-", color=color, linewidth=2, markersize=5)
        axes.annotate(name, (shares[-1], seconds[-1]), xytext=(8, -3), textcoords="offset points", color=color,
                      fontsize=10)  # fmt: skip
    together = update_time(work, Layout(CARDS["H100"], 64, 0, 4)).seconds
    axes.axhline(together, color=MUTED, linewidth=1.2, linestyle=(0, (4, 3)))
    axes.annotate("in turns on all 64", (56, together), xytext=(-20, 6), textcoords="offset points", color=MUTED,
                  fontsize=10)  # fmt: skip
    axes.set_xticks(shares)
    axes.set_xlim(6, 66)
    axes.set_ylim(0, None)
    label_axes(axes, title="8B on 64 H100, servers of 4 cards", x_label="cards that sample",
               y_label="seconds per update")  # fmt: skip
    return figure


def sizes_table() -> str:
    """For each size: the fewest cards that fit, the cheapest and a fast number of cards."""
    lines = [
        "| policy | fewest H100 | there | cheapest: card-hours per 1,000 updates | bound by |",
        "|---|---|---|---|---|",
    ]
    for size in SIZES:
        updates = [each for number in NUMBERS if (each := best_of(size, number))]
        least = updates[0]
        best = cheapest(updates)
        assert best
        lines.append(
            f"| {size / 1e9:g}B | {least.layout.cards} | {_short(least.seconds)} s, {least.trainer.bytes / 1e9:.0f} GB "
            f"of a training card | {best.card_seconds / 3.6:,.0f} on {best.layout.cards}: {_short(best.seconds)} s | "
            f"{best.bottleneck} |"
        )
    return "\n".join(lines)


def cards_table() -> str:
    """For each number of cards: the cheapest layout of an 8B policy, and the cheapest that is synchronous."""
    lines = [
        "| H100 | cheapest layout | s per update | card-hours per 1,000 | bottleneck | synchronous: s |",
        "|---|---|---|---|---|---|",
    ]
    for number in NUMBERS:
        best = best_of(8e9, number)
        synchronous = best_of(8e9, number, synchronous=True)
        if best is None or synchronous is None:
            lines.append(f"| {number} | does not fit | | | | |")
            continue
        name = layout_name(best.layout).removeprefix(f"{number} cards ")
        lines.append(
            f"| {number} | {name} | {_short(best.seconds)} | {best.card_seconds / 3.6:,.0f} | {best.bottleneck} | "
            f"{_short(synchronous.seconds)} |"
        )
    return "\n".join(lines)


def memory_table() -> str:
    """Memory of a training card, without a separate critic, by size and number of cards."""
    numbers = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    lines = [f"| policy | {' | '.join(map(str, numbers))} |", f"|---|{'---|' * len(numbers)}"]
    for size in SIZES:
        held = [update_time(example(size), Layout(CARDS["H100"], number)).trainer for number in numbers]
        cells = [f"{each.bytes / 1e9:.0f}" for each in held]
        lines.append(f"| {size / 1e9:g}B | {' | '.join(cells)} |")
    return "\n".join(lines)


def published_table() -> str:
    """Every published update beside the model, by kind."""
    lines = ["| published | cards | published s | model s | published ÷ model |", "|---|---|---|---|---|"]
    checks = checked_updates()
    for name, kind in KINDS.items():
        lines.append(f"| **{kind.about}** | | | | **{kind.low:g} to {kind.high:g}** |")
        for row, seconds in checks:
            if row.kind == name:
                lines.append(f"| {row.name} | {row.layout.cards} {row.layout.card.name} | {row.seconds:g} | "
                             f"{_short(seconds)} | {row.seconds / seconds:.2f} |")  # fmt: skip
    return "\n".join(lines)


def sources_table() -> str:
    """Sources and assumptions of the published figures."""
    lines = ["| source | figures | assumed |", "|---|---|---|"]
    rows = [row for row, _ in checked_updates()]
    for source in dict.fromkeys(row.source for row in rows):
        of_it = [row for row in rows if row.source == source]
        notes = dict.fromkeys(row.note or "prompts of 160 tokens" for row in of_it)
        lines.append(f"| {source} | {len(of_it)} | {'; '.join(notes)} |")
    return "\n".join(lines)


def accelerators_table() -> str:
    """The known cards."""
    lines = [
        "| card | bf16 peak, TFLOP/s | memory, GB | its bandwidth, TB/s | link, GB/s | network, GB/s | source |",
        "|---|---|---|---|---|---|---|",
    ]
    for card in CARDS.values():
        lines.append(
            f"| {card.name} | {card.flops / 1e12:,.0f} | {card.memory / 1e9:.0f} | {card.bandwidth / 1e12:g} | "
            f"{card.link / 1e9:.0f} | {card.network / 1e9:.0f} | {card.source} |"
        )
    return "\n".join(lines)


def syncs_table() -> str:
    """Every published weight sync beside the model."""
    lines = ["| published | cards | published s | model s |", "|---|---|---|---|"]
    for row, seconds in checked_syncs():
        cards = f"{row.layout.training_cards} + {row.layout.rollout_cards} {row.layout.card.name}"
        lines.append(f"| {row.name} | {cards} | {row.seconds:g} | {seconds:.2f} |")
    return "\n".join(lines)


def _phase(update: UpdateTime, name: str) -> float:
    seconds = {"rollout": update.rollout.seconds, "passes": update.experience.seconds,
               "training": update.training.seconds, "weight sync": update.sync, "other": update.other}  # fmt: skip
    return seconds[name]


def _number_cards(axes: Axes) -> None:
    axes.xaxis.set_major_locator(FixedLocator(NUMBERS))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([str(number) for number in NUMBERS])
    low, high = axes.get_ylim()
    ticks = [10.0**power for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.set_yticklabels([f"{tick:g}" for tick in ticks])
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylim(low, high)


def _short(seconds: float) -> str:
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.1f}"


TABLES: Final[dict[str, Callable[[], str]]] = {
    "sizes": sizes_table,
    "cards": cards_table,
    "memory": memory_table,
    "accelerators": accelerators_table,
    "published": published_table,
    "sources": sources_table,
    "syncs": syncs_table,
}
SCALING_PICTURES: Final[dict[str, Callable[[], Figure]]] = {
    "scaling-phases": draw_phases,
    "scaling-cards": draw_prices,
    "scaling-sides": draw_sides,
}
