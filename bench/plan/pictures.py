"""The pictures of docs/memory.md and RESULTS.md: what a run holds at its peak, and planned against measured peaks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from matplotlib.figure import Figure

from bench.plan.cases import CASES
from bench.plan.page import Results
from bench.plan.sizes import GIB, RUNS, SIZES, plan_of_size
from handbook.palette import INK, MARK, MUTED, POLICY, REFERENCES, SCORE, START, VALUE
from handbook.style import label_axes, new_axes
from handbook.svg import save_svg

SHOWN: Final = "1.5B (Qwen2.5)"
KINDS: Final[Mapping[str, str]] = {
    "weights": POLICY,
    "gradients": MARK,
    "optimizer": REFERENCES,
    "activations": VALUE.color,
    "logits": SCORE.color,
}
"""The kinds of memory with their colors; the others are small at the peak of these runs."""
CARDS: Final = {"RTX 4090": 24, "A100 40 GB": 40}


def draw_pictures(results: Results, folder: Path) -> None:
    """Write both as SVG."""
    save_svg(draw_kinds(), folder / "memory-kinds.svg")
    save_svg(draw_measured(results), folder / "memory-measured.svg")


def draw_kinds() -> Figure:
    """A bar per run of the table of sizes: the planned peak of one model by kind, GiB."""
    figure, [axes] = new_axes(width=9.0, height=4.6)
    peaks = [plan_of_size(SIZES[SHOWN], settings).peak for settings in RUNS.values()]
    below = [0.0] * len(peaks)
    for kind, color in KINDS.items():
        sizes = [sum(size for (held, _), size in peak.held.items() if held == kind) / GIB for peak in peaks]
        axes.bar(range(len(peaks)), sizes, bottom=below, color=color, width=0.62, label=kind)
        below = [low + size for low, size in zip(below, sizes, strict=True)]
    for place, (peak, top) in enumerate(zip(peaks, below, strict=True)):
        text = f"{peak.bytes / GIB:.1f}, in {peak.name}"
        axes.annotate(text, (place, top + 0.8), ha="center", color=INK, fontsize=9)
    for name, size in CARDS.items():
        axes.axhline(size, color=MUTED, linewidth=1.0, linestyle=(0, (4, 3)))
        axes.annotate(name, (len(peaks) - 0.6, size + 0.7), ha="right", color=MUTED, fontsize=9)
    names = [name.replace(", ", ",\n").replace(" on a ", "\non a ") for name in RUNS]
    axes.set_xticks(range(len(peaks)), names)
    axes.set_ylim(0, 1.12 * max(below))
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=10, labelcolor=INK)
    label_axes(axes, title="What PPO with a policy of 1.5B holds at its peak", y_label="GiB")
    return figure


def draw_measured(results: Results) -> Figure:
    """A point per run: the planned peak over the measured one, and the process's growth where it was measured."""
    figure, [axes] = new_axes(width=9.0, height=4.6)
    rows = [(case, results[case.name]) for case in CASES if "live" in results.get(case.name, {})]
    kinds = (
        ("PPO, all weights", POLICY, [row for case, row in rows if case.stage == "ppo" and case.adapter == "none"]),
        ("PPO, adapter", REFERENCES, [row for case, row in rows if case.stage == "ppo" and case.adapter != "none"]),
        ("critic", VALUE.color, [row for case, row in rows if case.stage == "critic"]),
    )
    for name, color, chosen in kinds:
        measured, planned = ([row["live"][key] for row in chosen] for key in ("live", "planned"))
        axes.loglog(measured, planned, "o", color=color, markersize=6, label=f"{name}: tensors")
    grown = [row for _, row in rows if "heap" in row.get("process", {})]
    heap = [row["process"]["heap"] for row in grown]
    planned = [row["live"]["planned"] for row in grown]
    axes.loglog(heap, planned, "x", color=START, markersize=6, label="the heap that holds them")
    ends = [
        0.9 * min(row["live"]["live"] for _, row in rows),
        1.1 * max([*heap, *(r["live"]["live"] for _, r in rows)]),
    ]
    axes.loglog(ends, ends, color=MUTED, linewidth=1.0, linestyle=(0, (4, 3)))
    ticks = [each for each in (20, 50, 100, 200, 500, 1000, 2000) if ends[0] <= each <= ends[1]]
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(ticks, [f"{each:,}" for each in ticks])
        axis.set_ticks([], minor=True)
    axes.legend(loc="upper left", frameon=False, fontsize=10, labelcolor=INK)
    label_axes(axes, title="Planned and measured peaks", x_label="measured, MiB", y_label="planned, MiB")
    return figure
