"""Reads `plan.yaml`: tasks, algorithms, the grid that each is tuned on, and the ablations."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import yaml

from bench.study.unit import Budget, Unit

PLAN: Final = Path(__file__).with_name("plan.yaml")

RATE = "ppo.learning_rate"
EPOCHS = "ppo.num_epochs"
RESPONSES = "rollout.num_responses"
CRITIC: Final = "ppo.critic"


@dataclass(frozen=True)
class TaskPlan:
    """The plan of a task's runs.

    Attributes:
        budget: Tokens and FLOPs that a run spends at least.
        responses: Responses per update, for any number per prompt.
        eval_every: Updates between two points of a curve.
        learning_rates: The grid.
        settings: Of all its runs.
        separate_critic: Further settings of runs with a separate critic: those that its model needs to learn.
    """

    budget: Budget
    responses: int
    eval_every: int
    learning_rates: tuple[float, ...]
    settings: Mapping[str, Any]
    separate_critic: Mapping[str, Any]


@dataclass(frozen=True)
class Algorithm:
    """An algorithm: what it is, and the settings that make it."""

    about: str
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Ablation:
    """The changes of one algorithm.

    Attributes:
        of: The algorithm's name.
        tasks: Where they are tried.
        seeds: Of the runs.
        changes: Settings by name.
    """

    of: str
    tasks: tuple[str, ...]
    seeds: tuple[int, ...]
    changes: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Plan:
    """The whole plan.

    Attributes:
        question: The question.
        expectations: The expectations before the runs.
        tasks: By name.
        algorithms: By name.
        common: Settings of every run.
        critic_checks: Further settings of compared runs with a critic: the prefix test.
        num_epochs: The grid's second axis.
        tuning_seeds: Seeds of the tuning, which no comparison uses.
        seeds: Seeds of the comparison.
        ablation: The stack, changed.
    """

    question: str
    expectations: tuple[str, ...]
    tasks: Mapping[str, TaskPlan]
    algorithms: Mapping[str, Algorithm]
    common: Mapping[str, Any]
    critic_checks: Mapping[str, Any]
    num_epochs: tuple[int, ...]
    tuning_seeds: tuple[int, ...]
    seeds: tuple[int, ...]
    ablation: Ablation

    def grid(self, task: str) -> list[dict[str, Any]]:
        """The points on which every algorithm is tuned: the same number for each."""
        return [
            {RATE: rate, EPOCHS: epochs}
            for rate, epochs in itertools.product(self.tasks[task].learning_rates, self.num_epochs)
        ]

    def tuning(self, task: str, algorithm: str, point: Mapping[str, Any]) -> list[Unit]:
        """The runs that judge a point of the grid."""
        settings = {**self.algorithms[algorithm].settings, **point}
        return [self._unit(task, settings, seed) for seed in self.tuning_seeds]

    def comparison(self, task: str, algorithm: str, point: Mapping[str, Any]) -> list[Unit]:
        """The runs of a tuned algorithm."""
        settings = self._checked({**self.algorithms[algorithm].settings, **point})
        return [self._unit(task, settings, seed) for seed in self.seeds]

    def changed(self, task: str, change: str | None, point: Mapping[str, Any]) -> list[Unit]:
        """The runs of a change of the ablated algorithm, without the prefix test, which changes no run.

        Those of the algorithm itself, if the change is None, are the comparison's.
        """
        whole = {**self.algorithms[self.ablation.of].settings, **point}
        settings = self._checked(whole) if change is None else {**whole, **self.ablation.changes[change]}
        return [self._unit(task, settings, seed) for seed in self.ablation.seeds]

    def _checked(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings, with the prefix test's if they have a critic."""
        return {**settings, **(self.critic_checks if CRITIC in settings else {})}

    def _unit(self, task: str, settings: Mapping[str, Any], seed: int) -> Unit:
        own = self.tasks[task]
        critic = own.separate_critic if settings.get(CRITIC) == "separate" else {}
        merged = {**self.common, **own.settings, **critic, **settings, "ppo.eval_every": own.eval_every}
        merged["rollout.num_prompts"] = own.responses // int(merged.get(RESPONSES, 1))
        return Unit(task, merged, seed, own.budget)


def read_plan(*, small: bool = False) -> Plan:
    """The plan; with `small` that of `make study-small`."""
    text: dict[str, Any] = yaml.safe_load(PLAN.read_text(encoding="utf-8"))
    plan = _plan(text)
    return _reduced(plan, text["small"]) if small else plan


def _plan(text: Mapping[str, Any]) -> Plan:
    ablation = text["ablation"]
    return Plan(
        question=text["question"],
        expectations=tuple(text["expectations"]),
        tasks={name: _task(each) for name, each in text["tasks"].items()},
        algorithms={name: Algorithm(**each) for name, each in text["algorithms"].items()},
        common=text["common"],
        critic_checks=text["critic_checks"],
        num_epochs=tuple(text["tuning"]["num_epochs"]),
        tuning_seeds=tuple(text["tuning"]["seeds"]),
        seeds=tuple(text["comparison"]["seeds"]),
        ablation=Ablation(
            ablation["of"], tuple(ablation["tasks"]), tuple(ablation["seeds"]), changes=ablation["changes"]
        ),
    )


def _task(text: Mapping[str, Any]) -> TaskPlan:
    return TaskPlan(
        budget=Budget(float(text["tokens"]), float(text["flops"])),
        responses=text["responses"],
        eval_every=text["eval_every"],
        learning_rates=tuple(text["learning_rates"]),
        settings=text["settings"],
        separate_critic=text["separate_critic"],
    )


def _reduced(plan: Plan, small: Mapping[str, Any]) -> Plan:
    """Fewer tasks, seeds and changes, and a share of the budgets."""
    tasks = {name: plan.tasks[name] for name in small["tasks"]}
    kept = small["ablation"]
    return replace(
        plan,
        tasks={name: replace(each, budget=each.budget.share(small["share"])) for name, each in tasks.items()},
        num_epochs=tuple(small["tuning"]["num_epochs"]),
        tuning_seeds=tuple(small["tuning"]["seeds"]),
        seeds=tuple(small["comparison"]["seeds"]),
        ablation=replace(
            plan.ablation,
            tasks=tuple(kept["tasks"]),
            seeds=tuple(kept["seeds"]),
            changes={name: plan.ablation.changes[name] for name in kept["changes"]},
        ),
    )
