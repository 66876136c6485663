"""Output of the demo: `summary.json`, a table, and a few sample summaries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape

from kedge.logs.table import Cell, print_table
from kedge_lab.demo.gold_evaluation import CurvePoint, GoldScores
from kedge_lab.demo.world import AXES, Post

WITH_KL = "ppo"
WITHOUT_KL = "ppo-without-kl"
NUM_SAMPLES = 3
WRITERS = {"sft": "SFT policy", "ppo": "PPO policy", "references": "references"}


@dataclass(frozen=True)
class DemoResult:
    """Results of the demo.

    Attributes:
        posts: The held-out posts.
        scores: The judge's scores of `sft`, `ppo` and `references`.
        curves: Overoptimization curves of PPO (`WITH_KL`) and of PPO without a KL penalty (`WITHOUT_KL`).
        reward_model_accuracy: Share of held-out comparisons on which the reward model agrees with the annotator.
        kl: KL to the SFT policy in the last update, nats per response.
        explained_variance: Share of the returns' variance that the critic explains, mean of the last quarter of PPO.
        seconds: Duration of the whole demo.
    """

    posts: Sequence[Post]
    scores: Mapping[str, GoldScores]
    curves: Mapping[str, Sequence[CurvePoint]]
    reward_model_accuracy: float
    kl: float
    explained_variance: float
    seconds: float

    def summary(self) -> dict[str, Any]:
        """Figures for `summary.json`."""
        ppo, sft, references = (self.scores[name] for name in ("ppo", "sft", "references"))
        return {
            "win_rate_over_sft": asdict(ppo.win_rate_over(sft)),
            "win_rate_over_references": asdict(ppo.win_rate_over(references)),
            "gold_quality": {name: writer.quality.value for name, writer in self.scores.items()},
            "gold_axes": {name: {axis: writer.axis(axis) for axis in AXES} for name, writer in self.scores.items()},
            "gain_over_sft": ppo.gain_over(sft),
            "gain_over_references": ppo.gain_over(references),
            "reward_model_accuracy": self.reward_model_accuracy,
            "kl": self.kl,
            "explained_variance": self.explained_variance,
            "curves": {name: [asdict(point) for point in curve] for name, curve in self.curves.items()},
            "num_posts": len(self.posts),
            "seconds": round(self.seconds, 1),
        }


def print_result(result: DemoResult) -> None:
    """Print a few sample summaries and the figures."""
    console = Console(highlight=False)
    for index, post in enumerate(result.posts[:NUM_SAMPLES]):
        console.print(f"\n[bold]r/{post.subreddit} · {escape(post.title)}[/bold]\n{escape(post.text)}\n")
        for name, writer in result.scores.items():
            quality = writer.scores[index].quality
            console.print(f"  [dim]{WRITERS[name]}, {quality:.2f}:[/dim]{escape(writer.summaries[index])}")
    ppo = result.scores["ppo"]
    sft = result.scores["sft"]
    print()
    print_table(
        f"Gold judge on {len(result.posts)} held-out posts",
        ["writer", "quality", *AXES, "words", "PPO wins"],
        {WRITERS[name]: _row(writer, ppo) for name, writer in result.scores.items()},
    )
    gains = ", ".join(f"{axis} {gain:+.3f}" for axis, gain in ppo.gain_over(sft).items())
    print(f"Quality gain of PPO over SFT, by axis: {gains}")
    print(_describe_overoptimization(result.curves[WITHOUT_KL]))
    print(
        f"The reward model agrees with the annotator on {result.reward_model_accuracy:.0%} of held-out comparisons. "
        f"KL of PPO to SFT: {result.kl:.1f} nats per response. "
        f"The critic explains {result.explained_variance:.0%} of the variance of the returns."
    )


def _row(writer: GoldScores, ppo: GoldScores) -> list[Cell]:
    wins = None if writer is ppo else ppo.win_rate_over(writer)
    return [writer.quality, *(writer.axis(axis) for axis in AXES), writer.num_words, wins]


def _describe_overoptimization(curve: Sequence[CurvePoint]) -> str:
    best = max(curve, key=lambda point: point.gold.value)
    last = curve[-1]
    return (
        f"Without the KL penalty, after the judge's best point: reward model {best.proxy:.2f} -> {last.proxy:.2f}, "
        f"judge {best.gold.value:.2f} -> {last.gold.value:.2f}"
    )
