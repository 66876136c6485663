"""The demo's published figures: `python -m handbook.demo runs/demo` records them, `python -m handbook` writes them.

`handbook/demo.json` is the one source of the README's table, of the figure, and of every statement about the demo's
duration.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from bench.tables import renewed
from handbook.lines import Level, Line, draw_lines
from handbook.palette import KL, MARK, POLICY, QUALITY, REFERENCES, SCORE, START
from handbook.style import label_axes, limit_axis, new_axes
from handbook.svg import save_svg
from kedge_base.intervals import Interval
from kedge_lab.demo.gold_evaluation import CurvePoint
from kedge_lab.demo.main import WITHOUT_KL

RECORD = Path(__file__).parent / "demo.json"
WRITERS = {"sft": "SFT policy", "references": "reference summaries", "ppo": "**PPO policy**"}
LEVELS = {"sft": ("SFT policy", START), "ppo": ("PPO policy", POLICY), "references": ("references", REFERENCES)}
"""Name and color of each writer's baseline in the picture."""


@dataclass(frozen=True)
class DemoRecord:
    """Figures of one run of the demo.

    Attributes:
        gold_quality: Mean quality by writer.
        gold_axes: Mean score per axis, by writer.
        win_rates: Win rate of PPO, by opponent.
        reward_model_accuracy: Share of held-out comparisons.
        kl: Nats per response.
        explained_variance: Of the critic, mean of the last quarter of the updates.
        curve: The run without KL penalty.
        num_posts: Posts of the evaluation.
        seconds: Duration.
    """

    gold_quality: dict[str, float]
    gold_axes: dict[str, dict[str, float]]
    win_rates: dict[str, Interval]
    reward_model_accuracy: float
    kl: float
    explained_variance: float
    curve: list[CurvePoint]
    num_posts: int
    seconds: float


def read_demo(path: Path = RECORD) -> DemoRecord:
    """The record."""
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    curve = [CurvePoint(**{**point, "gold": Interval(**point["gold"])}) for point in record.pop("curve")]
    win_rates = {name: Interval(**rate) for name, rate in record.pop("win_rates").items()}
    return DemoRecord(curve=curve, win_rates=win_rates, **record)


def duration(record: DemoRecord) -> str:
    """The duration as the documentation states it: the recorded minutes, and twice that for a slower processor."""
    names = ("one", "two", "three", "four", "five", "six", "seven", "eight")
    minutes = max(1, round(record.seconds / 60))
    return f"{names[minutes - 1]} to {names[2 * minutes - 1]} minutes on two cores"


def results_block(record: DemoRecord) -> str:
    """The README's table of results."""
    return f"""\
| writer | gold quality | coverage | accuracy | PPO win rate against it |
|---|---|---|---|---|
{_rows(record)}

{record.num_posts} held-out posts, 95 % confidence intervals. The reward model agrees with the annotator on \
{100 * record.reward_model_accuracy:.0f} % of held-out
comparisons. KL between the PPO policy and the SFT policy: {record.kl:.1f} nats per response. In the last \
quarter of PPO the critic
explains {100 * record.explained_variance:.0f} % of the variance of the returns. Total time on two cores: \
{record.seconds:.0f} s. On
another kind of processor, rounding and thus the sampled texts differ, and the figures change within these intervals."""


def with_results(text: str, record: DemoRecord) -> str:
    """A page with the table between its markers renewed."""
    return renewed(text, "demo", results_block(record))


def draw_demo(record: DemoRecord, folder: Path) -> None:
    """Write the over-optimization curve, `demo.svg`."""
    save_svg(draw_curve(record.curve, record.gold_quality), folder / "demo.svg")


def draw_curve(curve: Sequence[CurvePoint], quality: Mapping[str, float]) -> Figure:
    """The proxy reward above the gold judge, over √KL, with the judge's best checkpoint marked.

    Two axes, because the two are on different scales.

    Args:
        curve: The checkpoints; negative estimates of the KL count as 0.
        quality: Mean quality by writer, as baselines.

    Source: Gao et al. (arXiv 2210.10760), figure 1.
    """
    points = sorted(curve, key=lambda point: point.kl)
    figure, (above, below) = new_axes(2, 1, width=6.8, height=5.6)
    roots = [math.sqrt(max(0.0, point.kl)) for point in points]
    gold = [point.gold for point in points]
    values = [each.value for each in gold]
    draw_lines(above, [Line(roots, [point.proxy for point in points], SCORE)])
    label_axes(above, title="Proxy: the reward model that PPO maximizes", y_label="score")
    judged = Line(roots, values, QUALITY, low=[each.low for each in gold], high=[each.high for each in gold])
    names = {name: LEVELS[name] for name in quality}
    draw_lines(below, [judged], levels=[Level(label, quality[name], color) for name, (label, color) in names.items()])
    label_axes(
        below,
        title="Gold: the judge that training never uses",
        x_label="√KL to the reference (KL in nats per response)",
        y_label="quality, 0 to 1",
    )
    for axes in (above, below):
        limit_axis(axes, KL, "x")
    best = max(range(len(values)), key=lambda index: values[index])
    below.plot(roots[best], values[best], "o", markersize=11, markerfacecolor="none", markeredgecolor=MARK)
    below.annotate(
        "best", (roots[best], values[best]), xytext=(0, 9), textcoords="offset points", ha="center",
        color=MARK, fontsize=10, fontweight="bold",
    )  # fmt: skip
    return figure


def _rows(record: DemoRecord) -> str:
    return "\n".join(
        f"| {label} | {record.gold_quality[name]:.2f} | {record.gold_axes[name]['coverage']:.2f} | "
        f"{record.gold_axes[name]['accuracy']:.2f} | {_percentages(record.win_rates.get(name))} |"
        for name, label in WRITERS.items()
    )


def _percentages(rate: Interval | None) -> str:
    return "–" if rate is None else f"{100 * rate.value:.0f} % ({100 * rate.low:.0f}–{100 * rate.high:.0f})"


def main(folder: Path) -> None:
    """Record a finished demo."""
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    same = ("gold_quality", "gold_axes", "reward_model_accuracy", "kl", "explained_variance", "num_posts", "seconds")
    rates = {"sft": summary["win_rate_over_sft"], "references": summary["win_rate_over_references"]}
    record = {name: summary[name] for name in same} | {"win_rates": rates, "curve": summary["curves"][WITHOUT_KL]}
    RECORD.write_text(json.dumps(_rounded(record), indent=1) + "\n", encoding="utf-8")


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_rounded(part) for part in value]
    return round(value, 4) if isinstance(value, float) else value


if __name__ == "__main__":
    main(Path(sys.argv[1]))
