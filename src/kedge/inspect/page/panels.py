"""The charts of each stage: which curves they combine, and what to expect of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

__all__ = ["PANELS", "Panel", "find_panels", "matches"]


@dataclass(frozen=True)
class Panel:
    """One chart of the page.

    Attributes:
        group: Its heading.
        title: Its title.
        unit: Unit of the y axis.
        lines: Labels by metric; a pattern that ends in `*` matches all metrics with that prefix, labeled by the rest.
        note: What to expect.
        level: A baseline to draw.
        floor: Lower limit of the axis, so that one extreme value does not flatten the rest.
        logarithmic: Whether values span orders of magnitude.
        stacked: Whether the lines add up to a whole.
        fewest: Number of lines below which the chart is left out.
        key: Whether it belongs next to the verdict.
    """

    group: str
    title: str
    unit: str
    lines: Mapping[str, str]
    note: str = ""
    level: float | None = None
    floor: float | None = None
    logarithmic: bool = False
    stacked: bool = False
    fewest: int = 1
    key: bool = False

    def as_json(self, names: Iterable[str]) -> dict[str, Any]:
        """The panel with the lines that have data."""
        lines = [
            {"metric": name, "label": label.replace("*", name.removeprefix(pattern.removesuffix("*")))}
            for pattern, label in self.lines.items()
            for name in sorted(names)
            if matches(pattern, name)
        ]
        shown = ("group", "title", "unit", "note", "level", "floor", "logarithmic", "stacked", "key")
        return {**{name: getattr(self, name) for name in shown}, "lines": lines}


def find_panels(stage: str, names: Iterable[str]) -> list[dict[str, Any]]:
    """The charts of a stage that have data.

    Args:
        stage: `sft`, `reward` or `ppo`.
        names: Metrics that some run of the stage has.
    """
    known = set(names)
    shown = [(panel, panel.as_json(known)) for panel in PANELS.get(stage, ())]
    return [found for panel, found in shown if len(found["lines"]) >= panel.fewest]


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern of `Panel.lines` matches a metric."""
    return name == pattern or (pattern.endswith("*") and name.startswith(pattern[:-1]))


PHASES = {
    "time/rollout": "rollout",
    "time/reward": "reward",
    "time/experience": "experience",
    "time/train": "training",
}
NATS = "nats per token"
PPO = (
    Panel("Reward and distance", "Score", "score", {"reward/score_mean": "mean"}, "Rises, then levels off.", key=True),
    Panel(
        "Reward and distance",
        "KL to the reference",
        "nats per response",
        {"objective/kl": "KL"},
        "From 0 to a few nats, or a few tens. Estimates near 0 can be negative.",
        level=0.0,
        key=True,
    ),
    Panel(
        "Reward and distance",
        "Score on held-out prompts",
        "score",
        {"reward/score_mean": "training prompts", "eval/score": "held-out prompts"},
        "Both rise. A growing gap: the policy memorizes the training prompts.",
        fewest=2,
    ),
    Panel(
        "Reward and distance",
        "Win rate against the start",
        "share",
        {"eval/win_rate": "held-out prompts"},
        "Rises from ½. Falls while the score rises: the reward is over-optimized.",
        level=0.5,
    ),
    Panel(
        "Reward and distance",
        "Rewards",
        "score",
        {
            "reward/total": "score minus KL cost",
            "reward/kl": "KL cost",
            "reward/score_std": "standard deviation of the scores",
        },
        "What PPO maximizes and the cost of the KL, if it is in the reward; and the spread of scores to learn from.",
    ),
    Panel(
        "Reward and distance",
        "Score by source",
        "unit of the source",
        {"score/*": "*"},
        "Each term and judge, unweighted.",
        fewest=2,
        key=True,
    ),
    Panel(
        "Policy step",
        "Entropy",
        NATS,
        {"policy/entropy": "entropy"},
        "Falls slowly. Near 0, exploration is over.",
        key=True,
    ),
    Panel(
        "Policy step",
        "Clip fraction",
        "share of tokens",
        {"policy/clip_fraction": "policy", "value/clip_fraction": "value"},
        "0 to 0.2. Always 0: steps are too small. Above: too large.",
    ),
    Panel(
        "Policy step",
        "Approximate KL",
        NATS,
        {"policy/approx_kl": "approx. KL"},
        "How far an update moves the policy; below about 0.02.",
    ),
    Panel(
        "Policy step",
        "Ratio range",
        "ρ",
        {"policy/ratio_max": "largest", "policy/ratio_mean": "mean", "policy/ratio_min": "smallest"},
        "The mean stays near 1.",
        level=1.0,
        logarithmic=True,
    ),
    Panel("Policy step", "Policy loss", "loss", {"policy/loss": "loss"}, "Around 0. Its size means little.", level=0.0),
    Panel(
        "Policy step",
        "Gradient norm",
        "before clipping",
        {"policy/grad_norm": "policy", "value/grad_norm": "separate critic"},
        "Finite, without a lasting rise.",
        logarithmic=True,
    ),
    Panel(
        "Critic",
        "Explained variance",
        "share",
        {"value/explained_variance": "explained"},
        "Rises from about 0 toward 1. Below 0, the critic does harm.",
        level=0.0,
        floor=-1.0,
        key=True,
    ),
    Panel(
        "Critic",
        "Ordered pairs",
        "share",
        {
            "critic/pairs_across": "different prompts",
            "critic/pairs_within": "same prompt",
            "critic/pairs_across_prompt_mean": "prompt's mean return, different prompts",
        },
        "Rises from ½, chance. Values of prefixes against the returns of fresh continuations.",
        level=0.5,
    ),
    Panel(
        "Critic",
        "Value loss",
        "loss",
        {"value/loss": "loss"},
        "Falls. ½ is no better than predicting the mean; a histogram's is at least 1.2.",
    ),
    Panel(
        "Critic",
        "Values and returns",
        "reward",
        {"value/mean": "values", "value/returns_mean": "returns"},
        "Values follow returns.",
    ),
    Panel(
        "Critic",
        "Spread",
        "reward",
        {"advantage/std": "advantages", "value/std": "values", "value/returns_std": "returns"},
        "The spread of advantages shrinks as the critic learns.",
    ),
    Panel(
        "Groups",
        "Prompts without spread",
        "share of prompts",
        {"group/constant": "all responses score the same"},
        "Their advantages are 0. Rises as prompts are solved.",
    ),
    Panel(
        "Groups",
        "Spread within groups",
        "score",
        {"group/score_std": "within groups", "reward/score_std": "all responses"},
        "What a group's baseline leaves to learn from.",
        fewest=2,
    ),
    Panel(
        "Groups",
        "Length by score",
        "tokens",
        {"group/length_above": "above the group's mean", "group/length_below": "below it"},
        "Close to each other, unless length matters.",
    ),
    Panel(
        "Responses",
        "Response length",
        "tokens",
        {"response/length": "mean", "response/length_max": "longest"},
        "Rising along with the score: the reward favors length.",
        key=True,
    ),
    Panel(
        "Responses",
        "EOS rate",
        "share of responses",
        {"response/eos_rate": "stopped"},
        "Near 1 if responses should end.",
    ),
    Panel(
        "Responses",
        "Repetition",
        "share",
        {"response/repetition": "repeated 4-grams", "prompt/distinct": "distinct prompts"},
        "Repetition rising along with the score: the reward is being hacked.",
    ),
    Panel(
        "Responses",
        "Score and length",
        "correlation",
        {"reward/length_correlation": "correlation"},
        "Near ±1, the score measures length.",
        level=0.0,
    ),
    Panel("Speed and memory", "Time by phase", "seconds per update", PHASES, "", stacked=True),
    Panel("Speed and memory", "Tokens per second", "1/s", {"tokens_per_second": "tokens"}, "Prompts and responses."),
    Panel(
        "Speed and memory",
        "Memory",
        "GiB",
        {"memory/process": "process", "memory/device": "device"},
        "Constant after the first updates.",
    ),
    Panel("Schedules", "Learning rate", "", {"policy/learning_rate": "learning rate"}),
    Panel("Schedules", "KL coefficient β", "score per nat", {"objective/kl_coef": "β"}),
)
SUPERVISED = (
    Panel("Learning", "Loss", "nats", {"loss": "training", "eval/loss": "held out"}, "Both fall.", key=True),
    Panel(
        "Learning",
        "Accuracy",
        "share",
        {
            "accuracy": "training",
            "eval/accuracy": "held out",
            "token_accuracy": "training, tokens",
            "eval/token_accuracy": "held out, tokens",
        },
        "Held-out accuracy stays close to training.",
        key=True,
    ),
    Panel("Learning", "Gradient norm", "before clipping", {"grad_norm": "norm"}, "Finite.", logarithmic=True),
    Panel("Learning", "Learning rate", "", {"learning_rate": "learning rate"}, "As scheduled."),
    Panel("Speed and memory", "Time of a step", "seconds", {"time/update": "step"}, ""),
    Panel("Speed and memory", "Tokens per second", "1/s", {"tokens_per_second": "tokens"}, "Prompts included."),
)
CRITIC = (
    Panel(
        "Learning",
        "Explained variance",
        "share",
        {"explained_variance": "training", "eval/explained_variance": "held out"},
        "Above 0, and the held-out one close to training: PPO begins at it.",
        level=0.0,
        key=True,
    ),
    replace(SUPERVISED[0], unit="half the squared error, in variances of the returns"),
    *SUPERVISED[2:],
)
SHARED = ("Entropy", "Clip fraction", "Ratio range", "Policy loss", "Gradient norm", "Explained variance", "Value loss")
CONTROL = (
    Panel(
        "Episodes",
        "Return",
        "sum of rewards",
        {"episode/return_mean": "last 100 episodes", "eval/return_mean": "most likely actions"},
        "Rises, then levels off. In the environment's own unit.",
        key=True,
    ),
    Panel("Episodes", "Length", "steps", {"episode/length_mean": "last 100 episodes"}, key=True),
    Panel(
        "Policy step",
        "KL of an update",
        "nats per step",
        {"policy/distance_moved": "after the update", "policy/approx_kl": "mean over its steps"},
        "KL(old‖new) of the distributions. Below about 0.05.",
        logarithmic=True,
        key=True,
    ),
    *(replace(panel, unit=panel.unit.replace("token", "step")) for panel in PPO if panel.title in SHARED),
    Panel(
        "Critic",
        "Values and returns",
        "reward as the critic learns it",
        {"value/mean": "values", "value/returns_mean": "returns"},
        "Values follow returns.",
    ),
    Panel(
        "Speed and memory",
        "Time by phase",
        "seconds per update",
        {"time/rollout": "playing", "time/experience": "experience", "time/train": "training"},
        "",
        stacked=True,
    ),
    Panel("Speed and memory", "Steps per second", "1/s", {"tokens_per_second": "environment steps"}, ""),
    Panel("Schedules", "Learning rate", "", {"policy/learning_rate": "learning rate"}),
)
PANELS = {"ppo": PPO, "sft": SUPERVISED, "reward": SUPERVISED, "critic": CRITIC, "control": CONTROL}
