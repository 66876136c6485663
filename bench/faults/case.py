"""A faulty or healthy run: how it differs from the base run, and the rule that should find the fault."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from bench.faults.base import EXAMINED, GOLD_WEIGHT, QUIET, SMALL, Base
from kedge.stages.critic import run_critic
from kedge.stages.ppo import run_ppo
from kedge.stages.reward import run_reward
from kedge.stages.sft import run_sft
from kedge_lab.demo.main import demo_config

Rows = list[dict[str, Any]]
Terms = Callable[[Base], list[dict[str, Any]]]
"""The value of `config.reward`."""


def reward_model(base: Base, **changes: Any) -> list[dict[str, Any]]:
    """The base's reward model."""
    return [{"source": str(base.reward), "name": "reward", **changes}]


def monitored(base: Base) -> list[dict[str, Any]]:
    """The base's reward model, with the gold judge as a term of weight 0."""
    return [*reward_model(base), base.gold(weight=0.0)]


def gold_judge(base: Base) -> list[dict[str, Any]]:
    """The gold judge as the reward."""
    return [base.gold(weight=GOLD_WEIGHT)]


def function(name: str, **changes: Any) -> Terms:
    """One of `bench.faults.rewards`."""
    return lambda base: [{"source": f"bench.faults.rewards:{name}", **changes}]


TASKS: Final[tuple[tuple[str, Terms, Callable[[Base], Path] | None], ...]] = (
    ("", reward_model, None),
    (", programmatic reward", function("tuneful"), None),
    (", gold judge", gold_judge, lambda base: base.critic),
)
"""Three tasks: what they add to a case's name, their reward, and the critic that PPO starts from."""


def sft_policy(base: Base) -> Path:
    """The base's SFT policy."""
    return base.policy


def untrained(base: Base) -> Path:
    """The base's untrained model."""
    return base.start


def unchanged(rows: Rows) -> Rows:
    """The data unchanged."""
    return rows


@dataclass(frozen=True)
class Case:
    """The differences of a run from the base run.

    Attributes:
        name: The fault, or the healthy setting, in a few words.
        rule: The rule that should find it; empty for a healthy run.
        settings: Configuration fields to change, by their dotted names.
        reward: The reward.
        stage: The stage to run.
        change: Transforms the base's prompts, demonstrations or comparisons, depending on the stage.
        start: The folder of the initial model.
        critic: The folder of a critic that PPO starts from; None for the demo's.
        teacher: The folder of a teacher, which stands for the reward; None for a run without one.
        bug: A bug to patch in for the duration of the run.
    """

    name: str
    rule: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    reward: Terms = reward_model
    stage: Literal["sft", "reward", "critic", "ppo"] = "ppo"
    change: Callable[[Rows], Rows] = unchanged
    start: Callable[[Base], Path] = sft_policy
    critic: Callable[[Base], Path] | None = None
    teacher: Callable[[Base], Path] | None = None
    bug: Callable[[], AbstractContextManager[Any]] = nullcontext

    @property
    def folder(self) -> str:
        """The name, as a folder name."""
        return "".join(letter if letter.isalnum() else "-" for letter in self.name).strip("-")


def run_case(case: Case, base: Base, out: Path) -> None:
    """Run a case to its end.

    Args:
        case: The case.
        base: The models it starts from.
        out: The run's folder.

    Raises:
        KedgeError: The run failed, possibly because of its fault.
    """
    RUNS[case.stage](case, base, out)


def _ppo(case: Case, base: Base, out: Path) -> None:
    start = case.start(base)
    settings = {"reward": case.reward(base), **SMALL, **case.settings}
    if case.critic is not None:
        settings["ppo.critic_init"] = str(case.critic(base))
    if case.teacher is not None:
        settings |= {"ppo.reference": str(case.teacher(base)), "reward": []}
    with case.bug():
        run_ppo(demo_config("ppo", start, out, seed=base.seed, **settings), prompts=case.change(base.prompts()))


def _sft(case: Case, base: Base, out: Path) -> None:
    demonstrations = case.change(base.demonstrations())
    with case.bug():
        run_sft(
            demo_config("sft", case.start(base), out, seed=base.seed, **QUIET, **case.settings),
            demonstrations=demonstrations,
        )


def _reward(case: Case, base: Base, out: Path) -> None:
    comparisons = case.change(base.comparisons())
    with case.bug():
        run_reward(
            demo_config("reward", case.start(base), out, seed=base.seed, **QUIET | EXAMINED | dict(case.settings)),
            comparisons=comparisons,
        )


def _critic(case: Case, base: Base, out: Path) -> None:
    settings = {"reward": case.reward(base), **QUIET, **EXAMINED, **case.settings}
    with case.bug():
        run_critic(
            demo_config("critic", case.start(base), out, seed=base.seed, **settings),
            prompts=case.change(base.prompts()),
        )


RUNS = {"ppo": _ppo, "sft": _sft, "reward": _reward, "critic": _critic}
