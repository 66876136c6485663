"""The demo: summarization of forum posts, trained from scratch and evaluated against known facts.

    texts ─▶ tokenizer, random weights ─▶ SFT on reference summaries ─▶ reward model on a noisy annotator's comparisons
          ─▶ PPO, with and without the KL penalty
          ─▶ evaluation on held-out posts by the gold judge, which no stage has access to

Source: Stiennon et al. 2020 (arXiv 2009.01325), in miniature.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from kedge.config import Config, config_from_settings, field_advice
from kedge.data import Comparison
from kedge.data.truncation import render_tldr
from kedge.logs.run_folder import create_run_folder
from kedge.models.untrained import save_untrained_llama, train_tokenizer
from kedge.rewards import RewardTerm
from kedge.runs.ending import chained
from kedge.stages.ppo import run_ppo
from kedge.stages.reward import run_reward
from kedge.stages.sft import run_sft
from kedge_base.run_folder.output import REPORT_FILE, write_summary
from kedge_inspect.report import leave_report
from kedge_lab.demo import recipe
from kedge_lab.demo.gold_evaluation import Curve, GoldScores, gold_judge, sample_summaries
from kedge_lab.demo.report import WITH_KL, WITHOUT_KL, DemoResult, print_result
from kedge_lab.demo.world import Post, World


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
