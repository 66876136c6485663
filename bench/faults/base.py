"""The models that every run starts from: the demo's world at half the size, trained once per seed and kept."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from transformers import PreTrainedTokenizerBase

from kedge.data.truncation import render_tldr
from kedge.models import load_tokenizer
from kedge.stages.critic import run_critic
from kedge.stages.reward import run_reward
from kedge.stages.sft import run_sft
from kedge_lab.demo import recipe
from kedge_lab.demo.gold_evaluation import sample_summaries
from kedge_lab.demo.main import demo_config, rows, start_from_scratch
from kedge_lab.demo.world import Post, World

NUM_DEMONSTRATIONS: Final = 7000
NUM_COMPARISONS: Final = 1200
NUM_SAMPLED_COMPARISONS: Final = 1000
NUM_NORMALIZATION: Final = 128
NUM_PROMPTS: Final = 1024

GOLD_WEIGHT: Final = 10.0
"""The KL penalty is made for a reward model; without this factor it would drown a quality from 0 to 1."""
CRITIC: Final = {"critic.num_responses": 4, "critic.learning_rate": 2e-3, "critic.num_epochs": 2}

QUIET: Final[dict[str, Any]] = {"runtime.report": False, "runtime.num_threads": 1}
EXAMINED: Final = {"data.eval_fraction": 0.15}
"""Of the comparisons: enough to compare an accuracy with the length baseline's."""
SMALL: Final[dict[str, Any]] = {
    "rollout.num_prompts": 64,
    "ppo.num_updates": 12,
    "ppo.value_head_rate": 1.0,  # of a critic that starts as the policy: where the reward is a function
    "runtime.num_fixed_prompts": 0,
    **QUIET,
}
"""Differences from the demo: smaller runs, one at a time on one core."""
SHARED: Final[dict[str, Any]] = {
    "ppo.critic": "shared",
    "ppo.critic_learning_rate": None,
    "ppo.value_warmup_updates": 0,
    "ppo.value_head_rate": 30.0,
    "ppo.value_clip_range": 0.2,
}
"""A value head on the policy's trunk instead of the demo's separate critic."""
CRITIC_FREE: Final[dict[str, Any]] = {
    "ppo.critic": "none",
    "ppo.critic_learning_rate": None,
    "ppo.value_gae_lambda": None,
    "ppo.value_warmup_updates": 0,
}
IN_GROUPS: Final[dict[str, Any]] = {
    **CRITIC_FREE,
    "ppo.advantage": "grpo",
    "ppo.aggregation": "sequence",
    "rollout.num_prompts": 16,
    "rollout.num_responses": 4,
}
"""Responses that are compared with those to the same prompt."""


@dataclass(frozen=True)
class Base:
    """The folders of one seed.

    Attributes:
        folder: The parent folder.
        seed: Seed of the world and of all training.
    """

    folder: Path
    seed: int

    @property
    def start(self) -> Path:
        """The tokenizer and an untrained model."""
        return self.folder / "start"

    @property
    def policy(self) -> Path:
        """The SFT policy."""
        return self.folder / "sft" / "model"

    @property
    def reward(self) -> Path:
        """The reward model."""
        return self.folder / "reward" / "model"

    @property
    def critic(self) -> Path:
        """A critic of the gold judge's score, trained before PPO: twelve updates are too few to learn its values."""
        return self.folder / "critic" / "model"

    def gold(self, **changes: Any) -> dict[str, Any]:
        """The gold judge as a term of the reward."""
        return {"source": "bench.faults.judge:gold", "name": "gold", "settings": {"world": self.seed}, **changes}

    def world(self, split: str = "train") -> World:
        """The world that the models were trained on."""
        return World(self.seed, split, partial(_render, load_tokenizer(self.start)))

    def demonstrations(self, count: int = NUM_DEMONSTRATIONS) -> list[dict[str, Any]]:
        """Reference summaries, as rows."""
        return rows(self.world().demonstrations(count))

    def prompts(self) -> list[dict[str, Any]]:
        """The prompts of PPO, as rows; the column `index` identifies the post."""
        return [{"text": each.text, **each.columns} for each in self.world("prompts").prompts(NUM_PROMPTS)]

    def comparisons(self) -> list[dict[str, Any]]:
        """The annotator's comparisons of reference summaries and of the policy's own."""
        world = self.world("comparisons")
        posts = world.posts(NUM_SAMPLED_COMPARISONS, start=NUM_COMPARISONS)
        first, second = (sample_summaries(self.policy, world, posts, draw=draw) for draw in (1, 2))
        sampled = [world.compare(*each) for each in zip(posts, first, second, strict=True) if each[1] != each[2]]
        return rows([*world.comparisons(NUM_COMPARISONS), *sampled])


def make_base(work: Path, seed: int) -> Base:
    """The base of a seed, trained unless it exists.

    Args:
        work: The folder of the bases.
        seed: The seed.
    """
    done = work / f"base-{seed}"
    partial_folder = work / f"base-{seed}.part"
    if not done.is_dir():
        shutil.rmtree(partial_folder, ignore_errors=True)
        partial_folder.mkdir(parents=True)
        _train(Base(partial_folder, seed))
        os.rename(partial_folder, done)
    return Base(done, seed)


def _train(base: Base) -> None:
    start_from_scratch(base.start, base.seed)
    run_sft(
        demo_config("sft", base.start, base.folder / "sft", seed=base.seed, **QUIET),
        demonstrations=base.demonstrations(),
    )
    run_reward(
        demo_config("reward", base.policy, base.folder / "reward", seed=base.seed, **QUIET | EXAMINED),
        comparisons=base.comparisons(),
        demonstrations=base.demonstrations(NUM_NORMALIZATION),
    )
    reward = [base.gold(weight=GOLD_WEIGHT)]
    run_critic(
        demo_config("critic", base.policy, base.folder / "critic", seed=base.seed, reward=reward, **QUIET | CRITIC),
        prompts=base.prompts(),
    )


def _render(tokenizer: PreTrainedTokenizerBase, post: Post) -> str:
    return render_tldr(post.subreddit, post.title, post.text, tokenizer, recipe.MAX_PROMPT_TOKENS)
