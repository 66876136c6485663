"""Gold evaluation of the demo: the gold judge scores summaries of posts that no stage was trained on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from kedge.algorithm.experience import Rollout
from kedge.algorithm.statistics import win_rate
from kedge.config import Config
from kedge.data import Prompt, encode_prompt
from kedge.models import response_logprobs
from kedge.rewards.score import describe_responses
from kedge.rollout import Engine
from kedge.stages.policy import SamplingSettings, load_frozen_policy
from kedge.stages.ppo.roles import Roles
from kedge.training.runtime import stream_seed
from kedge_base.intervals import Interval, mean_interval
from kedge_lab.demo import recipe
from kedge_lab.demo.world import AXES, Post, SummaryScores, World, judge_summary

SAMPLED_AT_ONCE = 256


@dataclass(frozen=True)
class GoldScores:
    """The judge's scores of one writer.

    Attributes:
        summaries: One summary per post.
        scores: Scores of each summary.
    """

    summaries: list[str]
    scores: list[SummaryScores]

    @classmethod
    def of(cls, posts: Sequence[Post], summaries: list[str]) -> GoldScores:
        """Judge one summary per post."""
        return cls(summaries, [judge_summary(post, text) for post, text in zip(posts, summaries, strict=True)])

    @property
    def quality(self) -> Interval:
        """Mean quality."""
        return mean_interval(self._qualities())

    @property
    def num_words(self) -> float:
        """Mean length in words."""
        return mean(len(text.split()) for text in self.summaries)

    def axis(self, name: str) -> float:
        """Mean score on one axis."""
        return mean(getattr(each, name) for each in self.scores)

    def win_rate_over(self, others: GoldScores) -> Interval:
        """Share of posts on which this writer beats another; ties count half."""
        return win_rate(self._qualities(), others._qualities())

    def gain_over(self, others: GoldScores) -> dict[str, float]:
        """Contribution of each axis to the difference in quality."""
        return {name: weight * (self.axis(name) - others.axis(name)) for name, weight in AXES.items()}

    def _qualities(self) -> list[float]:
        # Rounded, so that equal scores tie despite floating-point error.
        return [round(each.quality, 9) for each in self.scores]


@dataclass(frozen=True)
class CurvePoint:
    """One point of the overoptimization curve.

    Attributes:
        update: Number of PPO updates before it.
        kl: KL to the SFT policy, nats per response.
        proxy: Mean score of the reward model.
        gold: Mean quality by the judge.
    """

    update: int
    kl: float
    proxy: float
    gold: Interval


@dataclass(frozen=True)
class Curve:
    """Callback of PPO that evaluates the policy every few updates, without affecting training.

    Attributes:
        world: World; its first posts are summarized each time.
        points: The points so far.
    """

    world: World
    points: list[CurvePoint] = field(default_factory=list)

    def __call__(self, update: int, roles: Roles) -> None:
        """Sample, score and judge after the first update and then every few updates."""
        if update != 1 and update % recipe.CURVE_EVERY:
            return
        posts = self.world.posts(recipe.NUM_CURVE_POSTS)
        prompts = [self.world.prompt(post) for post in posts]
        rollout = _roll_out(roles.engine, roles.tokenizer, prompts, seed=self.world.seed)
        responses = describe_responses(rollout, prompts, roles.tokenizer)
        assert roles.reference is not None, "both PPO runs of the demo measure KL"
        with torch.no_grad():
            reference = response_logprobs(roles.reference, rollout, temperature=recipe.TEMPERATURE)
        scores = roles.reward.score(responses)
        self.points.append(
            CurvePoint(
                update,
                kl=float((rollout.logprobs - reference).sum(dim=1).mean()),
                proxy=mean(score for score in scores if score is not None),
                gold=GoldScores.of(posts, responses.completions).quality,
            )
        )


def gold_judge(world: World) -> Callable[..., list[float]]:
    """The judge as a reward of weight 0: logged for PPO's own responses, without effect on training."""

    def gold(completions: list[str], index: list[int], **_: Any) -> list[float]:
        pairs = zip(index, completions, strict=True)
        return [judge_summary(world.post(number), text).quality for number, text in pairs]

    return gold


def sample_summaries(model: Path, world: World, posts: Sequence[Post], *, draw: int = 0) -> list[str]:
    """Sample one summary per post from a policy, at the training temperature; `draw` selects the random streams."""
    policy = load_frozen_policy(str(model), Config(), device=torch.device("cpu"), precision="fp32")
    sampling = SamplingSettings(
        recipe.MAX_NEW_TOKENS,
        recipe.TEMPERATURE,
        batch_size=SAMPLED_AT_ONCE,
        seed=stream_seed(world.seed, "summaries", draw),
    )
    prompts = [world.prompt(post) for post in posts]
    rollout = _roll_out(policy.sampler(sampling), policy.tokenizer, prompts, seed=sampling.seed)
    return describe_responses(rollout, prompts, policy.tokenizer).completions


def _roll_out(engine: Engine, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], *, seed: int) -> Rollout:
    """Sample one response per prompt, each with its own random stream."""
    return engine.generate(
        [encode_prompt(tokenizer, prompt.text) for prompt in prompts],
        seeds=[stream_seed(seed, "exam", row) for row in range(len(prompts))],
    )
