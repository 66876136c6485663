"""What the demo leaves and prints: `summary.json`, two plots, a table, and a few summaries to read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.markup import escape

from kedge.demo.exam import Checkpoint, Marks
from kedge.demo.world import AXES, Post
from kedge.logs.plots.results import plot_intervals, plot_overoptimization
from kedge.logs.table import Cell, print_table

__all__ = ["LEASHED", "UNLEASHED", "DemoResult", "print_result", "save_result"]

LEASHED: Final = "ppo"
UNLEASHED: Final = "ppo-without-leash"
NUM_SAMPLES: Final = 3
WRITERS: Final = {"sft": "SFT policy", "ppo": "PPO policy", "references": "references"}


@dataclass(frozen=True)
class DemoResult:
    """What the demo shows.

    Attributes:
        posts: The held-out posts.
        marks: What the judge thinks of `sft`, `ppo` and `references`.
        curves: Checkpoints of PPO (`LEASHED`) and of PPO without a KL penalty (`UNLEASHED`).
        reward_model_accuracy: Share of held-out comparisons in which the reward model agrees with the annotator.
        kl: KL of the last update to the SFT policy, nats per response.
        seconds: The whole demo's.
    """

    posts: Sequence[Post]
    marks: Mapping[str, Marks]
    curves: Mapping[str, Sequence[Checkpoint]]
    reward_model_accuracy: float
    kl: float
    seconds: float

    def summary(self) -> dict[str, Any]:
        """The figures, for `summary.json`."""
        ppo, sft, references = (self.marks[name] for name in ("ppo", "sft", "references"))
        return {
            "win_rate_over_sft": asdict(ppo.win_rate_over(sft)),
            "win_rate_over_references": asdict(ppo.win_rate_over(references)),
            "gold_quality": {name: marks.quality.value for name, marks in self.marks.items()},
            "gold_axes": {name: {axis: marks.axis(axis) for axis in AXES} for name, marks in self.marks.items()},
            "gain_over_sft": ppo.gain_over(sft),
            "gain_over_references": ppo.gain_over(references),
            "reward_model_accuracy": self.reward_model_accuracy,
            "kl": self.kl,
            "curves": {name: [asdict(checkpoint) for checkpoint in curve] for name, curve in self.curves.items()},
            "num_posts": len(self.posts),
            "seconds": round(self.seconds, 1),
        }


def save_result(result: DemoResult, folder: Path) -> None:
    """Write `summary.json` and the plots."""
    summary = json.dumps(result.summary(), indent=2)
    (folder / "summary.json").write_text(summary + "\n", encoding="utf-8")
    _plot(result, folder / "plots")


def print_result(result: DemoResult) -> None:
    """Print a few summaries and the figures."""
    _print_samples(result)
    _print_figures(result)


def _plot(result: DemoResult, folder: Path) -> None:
    named = {WRITERS[name]: marks for name, marks in result.marks.items()}
    curve, ppo = sorted(result.curves[UNLEASHED], key=lambda checkpoint: checkpoint.kl), result.marks["ppo"]
    plot_overoptimization(
        [checkpoint.kl for checkpoint in curve],
        [checkpoint.proxy for checkpoint in curve],
        [checkpoint.gold.value for checkpoint in curve],
        folder / "overoptimization.png",
        gold_band=([checkpoint.gold.low for checkpoint in curve], [checkpoint.gold.high for checkpoint in curve]),
        levels={name: marks.quality.value for name, marks in named.items()},
    )
    plot_intervals(
        {
            "Gold quality": {name: marks.quality for name, marks in named.items()},
            "Win rate of PPO": {f"over {name}": ppo.win_rate_over(m) for name, m in named.items() if m is not ppo},
        },
        folder / "results.png",
        levels={"Win rate of PPO": 0.5},
    )


def _print_samples(result: DemoResult) -> None:
    console = Console(highlight=False)
    for index, post in enumerate(result.posts[:NUM_SAMPLES]):
        console.print(f"\n[bold]r/{post.subreddit} · {escape(post.title)}[/bold]\n{escape(post.text)}\n")
        for name, marks in result.marks.items():
            quality = marks.verdicts[index].quality
            console.print(f"  [dim]{WRITERS[name]}, {quality:.2f}:[/dim]{escape(marks.summaries[index])}")


def _print_figures(result: DemoResult) -> None:
    ppo, sft = result.marks["ppo"], result.marks["sft"]
    print()
    print_table(
        f"What the gold judge thinks of {len(result.posts)} held-out posts",
        ["writer", "quality", *AXES, "words", "PPO wins"],
        {WRITERS[name]: _row(marks, ppo) for name, marks in result.marks.items()},
    )
    gains = ", ".join(f"{axis} {gain:+.3f}" for axis, gain in ppo.gain_over(sft).items())
    print(f"PPO's quality less SFT's, by axis: {gains}")
    print(_describe_overoptimization(result.curves[UNLEASHED]))
    print(
        f"The reward model agrees with the annotator on {result.reward_model_accuracy:.0%} of held-out comparisons; "
        f"PPO went {result.kl:.1f} nats away from SFT."
    )


def _row(marks: Marks, ppo: Marks) -> list[Cell]:
    wins = None if marks is ppo else ppo.win_rate_over(marks)
    return [marks.quality, *(marks.axis(axis) for axis in AXES), marks.num_words, wins]


def _describe_overoptimization(curve: Sequence[Checkpoint]) -> str:
    best, last = max(curve, key=lambda checkpoint: checkpoint.gold.value), curve[-1]
    return (
        f"Without the KL penalty the reward model's score goes from {best.proxy:.2f} to {last.proxy:.2f} "
        f"and the judge's from its best, {best.gold.value:.2f}, to {last.gold.value:.2f} (plots/overoptimization.png)"
    )
