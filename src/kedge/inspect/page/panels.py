"""Which curves stand together, stage by stage, and what each of them should look like."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["PANELS", "Panel", "covers", "find_panels"]


@dataclass(frozen=True)
class Panel:
    """One chart of the page.

    Attributes:
        group: The heading that it stands under.
        title: What is shown.
        unit: Of its axis.
        lines: Labels by metric; a metric that ends in `*` stands for all that begin so, labelled by what follows.
        note: What to expect.
        level: A level to compare with.
        floor: The axis ends there: one wild figure must not flatten the rest.
        logarithmic: Whether its figures span orders of magnitude.
        stacked: Whether its lines add up to a whole.
        fewest: With fewer lines it is left out.
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

    def as_json(self, names: Iterable[str]) -> dict[str, Any]:
        """The panel with the lines that the runs have figures for."""
        lines = [
            {"metric": name, "label": label.replace("*", name.removeprefix(pattern.removesuffix("*")))}
            for pattern, label in self.lines.items()
            for name in sorted(names)
            if covers(pattern, name)
        ]
        shown = ("group", "title", "unit", "note", "level", "floor", "logarithmic", "stacked")
        return {**{name: getattr(self, name) for name in shown}, "lines": lines}


def find_panels(stage: str, names: Iterable[str]) -> list[dict[str, Any]]:
    """The charts of a stage that have something to show.

    Args:
        stage: `sft`, `reward` or `ppo`.
        names: Metrics that some run of it has figures of.
    """
    known = set(names)
    shown = [(panel, panel.as_json(known)) for panel in PANELS.get(stage, ())]
    return [found for panel, found in shown if len(found["lines"]) >= panel.fewest]


def covers(pattern: str, name: str) -> bool:
    """Whether a panel's line is of this metric."""
    return name == pattern or (pattern.endswith("*") and name.startswith(pattern[:-1]))


PHASES = {
    "time/rollout": "rollout",
    "time/reward": "reward",
    "time/experience": "experience",
    "time/train": "training",
}
NATS = "nats per token"
PPO = (
    Panel("Reward and distance", "Score", "score", {"reward/score_mean": "mean"}, "Rises, then levels off."),
    Panel(
        "Reward and distance",
        "KL to the reference",
        "nats per response",
        {"objective/kl": "KL"},
        "From 0 to a few nats, up to a few tens. An estimate near 0 may come out negative.",
        level=0.0,
    ),
    Panel(
        "Reward and distance",
        "Rewards",
        "score",
        {"reward/total": "score less KL cost", "reward/kl": "KL cost", "reward/score_std": "spread of the scores"},
        "What PPO maximises, what the KL costs, and the spread that it learns from.",
    ),
    Panel(
        "Reward and distance",
        "Score by source",
        "its own",
        {"score/*": "*"},
        "Each term and judge, before its weight.",
        fewest=2,
    ),
    Panel("Policy step", "Entropy", NATS, {"policy/entropy": "entropy"}, "Falls slowly. Near 0 exploration is over."),
    Panel(
        "Policy step",
        "Clip fraction",
        "share of tokens",
        {"policy/clip_fraction": "policy", "value/clip_fraction": "value"},
        "0 to 0.2. Always 0: steps are small. Above: they are large.",
    ),
    Panel(
        "Policy step",
        "Approximate KL",
        NATS,
        {"policy/approx_kl": "approx. KL"},
        "How far an update moves the policy: below about 0.02.",
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
    Panel("Policy step", "Policy loss", "loss", {"policy/loss": "loss"}, "Around 0. Its size says little.", level=0.0),
    Panel(
        "Policy step",
        "Gradient norm",
        "before clipping",
        {"policy/grad_norm": "norm"},
        "Finite, and without long climbs.",
        logarithmic=True,
    ),
    Panel(
        "Critic",
        "Explained variance",
        "share",
        {"value/explained_variance": "explained"},
        "From about 0 towards 1. Below 0 the critic does harm.",
        level=0.0,
        floor=-1.0,
    ),
    Panel("Critic", "Value loss", "loss", {"value/loss": "loss"}, "Falls. ½: it knows no more than the mean."),
    Panel(
        "Critic",
        "Values and returns",
        "score",
        {"value/mean": "values", "value/returns_mean": "returns"},
        "The first follows the second.",
    ),
    Panel(
        "Critic",
        "Spread",
        "score",
        {"advantage/std": "advantages", "value/std": "values", "value/returns_std": "returns"},
        "Advantages narrow as the critic learns.",
    ),
    Panel(
        "Responses",
        "Response length",
        "tokens",
        {"response/length": "mean", "response/length_max": "longest"},
        "A steady climb with the score is a reward that likes length.",
    ),
    Panel("Responses", "EOS rate", "share of responses", {"response/eos_rate": "stopped"}, "Near 1, where they end."),
    Panel(
        "Responses",
        "Repetition",
        "share",
        {"response/repetition": "repeated 4-grams", "prompt/distinct": "prompts that differ"},
        "Repetition that climbs with the score is a hacked reward.",
    ),
    Panel(
        "Responses",
        "Score and length",
        "correlation",
        {"reward/length_correlation": "correlation"},
        "Near ±1 the score measures length.",
        level=0.0,
    ),
    Panel("Speed and memory", "Time by phase", "seconds per update", PHASES, "", stacked=True),
    Panel("Speed and memory", "Tokens per second", "1/s", {"tokens_per_second": "tokens"}, "Prompts and responses."),
    Panel(
        "Speed and memory",
        "Memory",
        "GiB",
        {"memory/process": "process", "memory/device": "device"},
        "Level after the first updates.",
    ),
    Panel("Schedules", "Learning rate", "", {"policy/learning_rate": "learning rate"}),
    Panel("Schedules", "KL coefficient β", "score per nat", {"objective/kl_coef": "β"}),
)
SUPERVISED = (
    Panel("Learning", "Loss", "nats", {"loss": "training", "eval/loss": "held out"}, "Both fall."),
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
        "Held out stays close to training.",
    ),
    Panel("Learning", "Gradient norm", "before clipping", {"grad_norm": "norm"}, "Finite.", logarithmic=True),
    Panel("Learning", "Learning rate", "", {"learning_rate": "learning rate"}, "As scheduled."),
    Panel("Speed and memory", "Time of a step", "seconds", {"time/update": "step"}, ""),
    Panel("Speed and memory", "Tokens per second", "1/s", {"tokens_per_second": "tokens"}, "Prompts included."),
)
PANELS = {"ppo": PPO, "sft": SUPERVISED, "reward": SUPERVISED}
