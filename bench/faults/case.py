"""A run with a fault in it, or without: what is different about it, and the rule that has to find it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bench.faults.base import EXAMINED, QUIET, SMALL, Base
from kedge.pipelines.demo import demo_config
from kedge.pipelines.ppo import run_ppo
from kedge.pipelines.reward import run_reward
from kedge.pipelines.sft import run_sft

__all__ = ["Case", "Rows", "Terms", "function", "gold", "learnt", "run_case", "untrained", "watched"]

Rows = list[dict[str, Any]]
Terms = Callable[[Base], list[dict[str, Any]]]
"""The reward of a run: what `config.reward` takes."""


def learnt(base: Base, **changes: Any) -> list[dict[str, Any]]:
    """The base's reward model."""
    return [{"source": str(base.reward), "name": "reward", **changes}]


def gold(base: Base, **changes: Any) -> dict[str, Any]:
    """The gold judge as a term of the reward."""
    return {"source": "bench.faults.judge:gold", "name": "gold", "settings": {"world": base.seed}, **changes}


def watched(base: Base) -> list[dict[str, Any]]:
    """The base's reward model; the gold judge looks on and has no say."""
    return [*learnt(base), gold(base, weight=0.0)]


def function(name: str, **changes: Any) -> Terms:
    """One of `bench.faults.rewards`."""
    return lambda base: [{"source": f"bench.faults.rewards:{name}", **changes}]


def taught(base: Base) -> Path:
    """The base's SFT policy."""
    return base.policy


def untrained(base: Base) -> Path:
    """The base's model that has learnt nothing yet."""
    return base.start


def untouched(rows: Rows) -> Rows:
    """The data as they are."""
    return rows


@dataclass(frozen=True)
class Case:
    """What is different about one run.

    Attributes:
        name: What is wrong, or right, in a few words.
        rule: The rule that finds it; empty for a healthy run.
        settings: By their dotted names, beyond the base's.
        reward: What scores.
        stage: Which stage runs.
        change: Makes its data of the base's: prompts, demonstrations or comparisons, by the stage.
        start: The folder of the model that it starts from.
        bug: A mistake in the code that stands as long as the run lasts.
    """

    name: str
    rule: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    reward: Terms = learnt
    stage: Literal["sft", "reward", "ppo"] = "ppo"
    change: Callable[[Rows], Rows] = untouched
    start: Callable[[Base], Path] = taught
    bug: Callable[[], AbstractContextManager[Any]] = nullcontext

    @property
    def folder(self) -> str:
        """Its name as a folder's."""
        return "".join(letter if letter.isalnum() else "-" for letter in self.name).strip("-")


def run_case(case: Case, base: Base, out: Path) -> None:
    """Run it to its end, or to where its fault ends it.

    Args:
        case: What.
        base: What it starts from.
        out: The run's folder.

    Raises:
        KedgeError: The run broke off.
    """
    RUNS[case.stage](case, base, out)


def _ppo(case: Case, base: Base, out: Path) -> None:
    start = case.start(base)
    settings = {"reward": case.reward(base), **SMALL, **case.settings}
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


RUNS = {"ppo": _ppo, "sft": _sft, "reward": _reward}
