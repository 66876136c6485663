"""The result of the chain: its folder, the result of each stage, and the summary."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kedge.logs.table import Cell, print_table
from kedge.runs.shown_result import shows_its_run
from kedge.stages.critic import CriticResult
from kedge.stages.ppo import PpoResult
from kedge.stages.reward import RewardResult
from kedge.stages.sft import SftResult
from kedge.system.intervals import Interval

__all__ = ["RlhfResult", "Round", "print_rounds", "summarize"]


@dataclass(frozen=True)
class Round:
    """A reward model and the policy trained against it, and the critic that was trained in between, if any."""

    reward: RewardResult
    ppo: PpoResult
    critic: CriticResult | None = None

    def summary(self) -> dict[str, Any]:
        """Figures of the round, for `summary.json`."""
        first, last = (self.ppo.metrics[0], self.ppo.metrics[-1]) if self.ppo.metrics else ({}, {})
        return {
            "reward_model": self.reward.summary,
            **({} if self.critic is None else {"critic": self.critic.summary}),
            "ppo": {
                "num_updates": len(self.ppo.metrics),
                "score_first": first.get("reward/score_mean"),
                "score_last": last.get("reward/score_mean"),
                "kl": last.get("objective/kl"),
            },
        }


@shows_its_run
@dataclass(frozen=True, repr=False)
class RlhfResult:
    """Result of the chain.

    Attributes:
        folder: The run's folder, with one folder per stage.
        sft: Result of fine-tuning.
        rounds: Results of the rounds of reward model and PPO.
        summary: Contents of `summary.json`.
    """

    folder: Path
    sft: SftResult
    rounds: list[Round]
    summary: dict[str, Any]

    @property
    def model(self) -> Path:
        """Folder of the newest policy, which plain transformers can load."""
        return self.folder / "model"


def summarize(sft: SftResult, rounds: list[Round]) -> dict[str, Any]:
    """Figures of the whole chain, for `summary.json`."""
    return {"sft": {"num_steps": sft.num_steps, **sft.evaluation}, "rounds": [each.summary() for each in rounds]}


def _interval(figures: dict[str, float | None]) -> Interval:
    """An interval from `summary.json`, where null is an unknown end."""
    return Interval(**{name: math.nan if each is None else each for name, each in figures.items()})


def print_rounds(folder: Path, summary: dict[str, Any]) -> None:
    """Print a table with one row per round."""
    rows: dict[str, list[Cell]] = {}
    for number, each in enumerate(summary["rounds"], start=1):
        accuracy, ppo = each["reward_model"].get("accuracy"), each["ppo"]
        agreement = None if accuracy is None else _interval(accuracy)
        critic = [_interval(each["critic"]["explained_variance"])] if "critic" in each else []
        rows[f"round {number}"] = [agreement, *critic, ppo["score_first"], ppo["score_last"], ppo["kl"]]
    explains = ["explained by the critic"] if "critic" in summary["rounds"][0] else []
    columns = ["", "reward-model accuracy", *explains, "score, first update", "score, last update", "KL"]
    print_table(f"The newest policy is in {folder / 'model'}", columns, rows)
