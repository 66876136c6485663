"""The demo: summarization of forum posts, trained from scratch and evaluated against known facts.

    texts ─▶ tokenizer, random weights ─▶ SFT on reference summaries ─▶ reward model on a noisy annotator's comparisons
          ─▶ PPO, with and without the KL penalty
          ─▶ evaluation on held-out posts by the gold judge, which no stage has access to

Source: Stiennon et al. 2020 (arXiv 2009.01325), in miniature.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.markup import escape

from kedge.config import Config, config_from_settings, field_advice
from kedge.data import Comparison
from kedge.data.truncation import render_tldr
from kedge.logs.run_folder import create_run_folder
from kedge.logs.table import Cell, print_table
from kedge.models.untrained import save_untrained_llama, train_tokenizer
from kedge.rewards import RewardTerm
from kedge.runs.ending import chained
from kedge.stages.ppo import run_ppo
from kedge.stages.reward import run_reward
from kedge.stages.sft import run_sft
from kedge_base.run_folder.output import REPORT_FILE, write_summary
from kedge_inspect.report import leave_report
from kedge_lab.demo import recipe
from kedge_lab.demo.gold_evaluation import Curve, CurvePoint, GoldScores, gold_judge, sample_summaries
from kedge_lab.demo.world import AXES, Post, World

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


@chained()
def run_demo(folder: str | Path, seed: int = 0) -> DemoResult:
    """Train tokenizer, SFT policy, reward model and PPO policies from scratch; evaluate and report.

    Args:
        folder: Output folder: a folder per stage and `summary.json`.
        seed: Seed of the world and of all training, ≥ 0.

    Raises:
        OutputError: The folder is not empty.
    """
    started = time.perf_counter()
    folder = create_run_folder(folder)
    world = start_from_scratch(folder / "start", seed)
    held_out = replace(world, split="held-out")

    sft = run_sft(
        demo_config("sft", folder / "start", folder / "sft", seed=seed),
        demonstrations=rows(world.demonstrations(recipe.NUM_DEMONSTRATIONS)),
    )
    reward = run_reward(
        demo_config("reward", sft.model, folder / "reward", seed=seed),
        comparisons=rows(collect_comparisons(replace(world, split="comparisons"), sft.model)),
        demonstrations=rows(world.demonstrations(recipe.NUM_NORMALIZATION)),
    )
    curves = {name: Curve(replace(world, split="curve")) for name in (WITH_KL, WITHOUT_KL)}
    prompts = replace(world, split="prompts")
    ppo, _ = (
        run_ppo(
            demo_config("ppo", sft.model, folder / name, seed=seed, **changes),
            prompts=[{"text": each.text, **each.columns} for each in prompts.prompts(recipe.NUM_PROMPTS)],
            reward=[RewardTerm(reward.model), RewardTerm(gold_judge(prompts), weight=0.0, name="gold")],
            on_update=curves[name],
        )
        for name, changes in ((WITH_KL, {}), (WITHOUT_KL, recipe.WITHOUT_KL_SETTINGS))
    )

    posts = held_out.posts(recipe.NUM_HELD_OUT)
    writers = {
        "sft": sample_summaries(sft.model, held_out, posts),
        "ppo": sample_summaries(ppo.model, held_out, posts),
        "references": [" " + held_out.reference(post) for post in posts],
    }
    result = DemoResult(
        posts=posts,
        scores={name: GoldScores.of(posts, summaries) for name, summaries in writers.items()},
        curves={name: curve.points for name, curve in curves.items()},
        reward_model_accuracy=reward.summary["accuracy"]["value"],
        kl=ppo.metrics[-1]["objective/kl"],
        explained_variance=fmean(row["value/explained_variance"] for row in ppo.metrics[-(len(ppo.metrics) // 4) :]),
        seconds=time.perf_counter() - started,
    )
    write_summary(folder, result.summary())
    leave_report(folder, advice=field_advice)
    print_result(result)
    print(f"Done in {result.seconds:.0f} s. Open {folder / REPORT_FILE}; models and logs are in the same folder")
    return result


def demo_config(stage: str, model: Path, out: Path, *, seed: int, **settings: Any) -> Config:
    """The configuration of one stage of the demo.

    Args:
        stage: `sft`, `reward`, `critic` or `ppo`.
        model: Folder of the model to start from.
        out: Output folder.
        seed: Seed of every random stream.
        settings: Further settings.
    """
    return config_from_settings(
        stage, {**recipe.SETTINGS, "model": str(model), "out": str(out), "runtime.seed": seed, **settings}
    )


def start_from_scratch(folder: Path, seed: int) -> World:
    """Save a new tokenizer and an untrained model; return the world that renders prompts for them."""
    texts = (record.prompt + record.completion for record in World(seed).demonstrations(recipe.NUM_TOKENIZER_TEXTS))
    tokenizer = train_tokenizer(texts, vocab_size=recipe.VOCAB_SIZE)
    save_untrained_llama(folder, tokenizer, **recipe.MODEL, seed=seed)

    def render(post: Post) -> str:
        return render_tldr(post.subreddit, post.title, post.text, tokenizer, recipe.MAX_PROMPT_TOKENS)

    return World(seed, render=render)


def collect_comparisons(world: World, policy: Path) -> list[Comparison]:
    """The annotator's preferences between pairs of reference summaries, and between pairs of the policy's samples.

    The samples contain mistakes that no author makes; PPO would exploit them if the reward model had not seen them.
    """
    posts = world.posts(recipe.NUM_SAMPLED_COMPARISONS, start=recipe.NUM_COMPARISONS)
    first, second = (sample_summaries(policy, world, posts, draw=draw) for draw in (1, 2))
    sampled = [world.compare(*each) for each in zip(posts, first, second, strict=True) if each[1] != each[2]]
    return world.comparisons(recipe.NUM_COMPARISONS) + sampled


def rows(records: Sequence[Any]) -> list[dict[str, Any]]:
    """Records as rows of a data set."""
    return [asdict(record) for record in records]


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
