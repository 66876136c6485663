"""The demo's world: summaries are trained on a reward model's score and judged by the gold judge."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from transformers import PreTrainedTokenizerBase

from bench.study.task import QUIET, Problem, Task
from kedge.data.truncation import render_tldr
from kedge.models import load_tokenizer
from kedge.rewards import RewardTerm
from kedge.stages.reward import run_reward
from kedge.stages.sft import run_sft
from kedge_lab.demo import recipe
from kedge_lab.demo.gold_evaluation import gold_judge
from kedge_lab.demo.main import collect_comparisons, demo_config, rows, start_from_scratch
from kedge_lab.demo.world import Post, World

SEED: Final = 0
CRITIC: Final[dict[str, Any]] = {
    "critic.num_prompts": 2048,
    "critic.num_responses": 1,
    "critic.num_epochs": 2,
    "critic.batch_size": 32,
    "critic.learning_rate": 1e-3,
    "rollout.max_new_tokens": recipe.MAX_NEW_TOKENS,
    "rollout.temperature": recipe.TEMPERATURE,
    "data.max_prompt_tokens": recipe.MAX_PROMPT_TOKENS,
    "runtime.precision": "fp32",
}
NUM_PROMPTS: Final = 8192
NUM_HELD_OUT: Final = 256


def _build(folder: Path) -> None:
    """The demo's first two stages."""
    world = start_from_scratch(folder / "start", SEED)
    sft = run_sft(
        demo_config("sft", folder / "start", folder / "sft", seed=SEED, **QUIET),
        demonstrations=rows(world.demonstrations(recipe.NUM_DEMONSTRATIONS)),
    )
    run_reward(
        demo_config("reward", sft.model, folder / "reward", seed=SEED, **QUIET),
        comparisons=rows(collect_comparisons(replace(world, split="comparisons"), sft.model)),
        demonstrations=rows(world.demonstrations(recipe.NUM_NORMALIZATION)),
    )


def _problem(folder: Path) -> Problem:
    world = World(SEED, "prompts", partial(_render, load_tokenizer(folder / "start")))
    posts = [{"text": each.text, **each.columns} for each in world.prompts(NUM_PROMPTS + NUM_HELD_OUT)]
    return Problem(
        folder / "sft" / "model",
        prompts=posts[NUM_HELD_OUT:],
        held_out=posts[:NUM_HELD_OUT],
        reward=[
            RewardTerm(str(folder / "reward" / "model")),
            RewardTerm(gold_judge(world), weight=0.0, name="gold"),
        ],
        score="eval/score/gold",
    )


def _render(tokenizer: PreTrainedTokenizerBase, post: Post) -> str:
    return render_tldr(post.subreddit, post.title, post.text, tokenizer, recipe.MAX_PROMPT_TOKENS)


SUMMARIES: Final = Task(_build, _problem, CRITIC, __file__)
