"""The order of the study: starts, tuning, comparison, ablation. Each part runs what the record does not have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.study.plan import Plan
from bench.study.unit import Outcome, Unit, read_outcomes

PARTS = ("tuning", "comparison", "ablation")


@dataclass(frozen=True)
class Study:
    """The plan and the runs recorded so far.

    Attributes:
        plan: The plan.
        tasks: Tasks that are run.
        outcomes: By key.
    """

    plan: Plan
    tasks: tuple[str, ...]
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: Plan, tasks: tuple[str, ...], record: Path) -> Study:
        """The study with a record's runs."""
        return cls(plan, tasks, read_outcomes(record))

    def units(self, part: str) -> dict[str, Unit]:
        """The runs of a part by a description of each; for what needs a tuned algorithm, once it is tuned."""
        return dict({"tuning": self._tuning, "comparison": self._comparison, "ablation": self._ablation}[part]())

    def missing(self, part: str) -> dict[str, Unit]:
        """The jobs that are not recorded; one of two for the same run."""
        unknown = {unit.key: (text, unit) for text, unit in self.units(part).items() if unit.key not in self.outcomes}
        return dict(unknown.values())

    def done(self, units: list[Unit]) -> list[Outcome]:
        """The outcomes of these runs; empty unless all are recorded."""
        found = [self.outcomes[unit.key] for unit in units if unit.key in self.outcomes]
        return found if len(found) == len(units) else []

    def judged(self, task: str, algorithm: str, point: Mapping[str, Any]) -> float | None:
        """A point of the grid: its mean score at equal FLOPs over the tuning's seeds; None if runs are missing."""
        outcomes = self.done(self.plan.tuning(task, algorithm, point))
        flops = self.plan.tasks[task].budget.flops
        return fmean(each.score_at("flops", flops) for each in outcomes) if outcomes else None

    def tuned(self, task: str, algorithm: str) -> dict[str, Any] | None:
        """The best point of the grid; None before all points are judged."""
        judged = [(self.judged(task, algorithm, point), point) for point in self.plan.grid(task)]
        known = [(score, point) for score, point in judged if score is not None]
        return max(known, key=lambda each: each[0])[1] if len(known) == len(judged) else None

    def compared(self, task: str, algorithm: str) -> list[Outcome]:
        """The runs of a tuned algorithm; empty before all are recorded."""
        point = self.tuned(task, algorithm)
        return [] if point is None else self.done(self.plan.comparison(task, algorithm, point))

    def changed(self, task: str, change: str | None) -> list[Outcome]:
        """The runs of a change of the ablated algorithm; empty before all are recorded."""
        point = self.tuned(task, self.plan.ablation.of)
        return [] if point is None else self.done(self.plan.changed(task, change, point))

    def _tuning(self) -> list[tuple[str, Unit]]:
        return [
            (_described(task, algorithm, point, unit), unit)
            for task in self.tasks
            for algorithm in self.plan.algorithms
            for point in self.plan.grid(task)
            for unit in self.plan.tuning(task, algorithm, point)
        ]

    def _comparison(self) -> list[tuple[str, Unit]]:
        return [
            (_described(task, algorithm, point, unit), unit)
            for task in self.tasks
            for algorithm in self.plan.algorithms
            if (point := self.tuned(task, algorithm))
            for unit in self.plan.comparison(task, algorithm, point)
        ]

    def _ablation(self) -> list[tuple[str, Unit]]:
        plan = self.plan.ablation
        return [
            (_described(task, change or plan.of, point, unit), unit)
            for task in plan.tasks
            if task in self.tasks and (point := self.tuned(task, plan.of))
            for change in (None, *plan.changes)
            for unit in self.plan.changed(task, change, point)
        ]


def _described(task: str, name: str, point: Mapping[str, Any], unit: Unit) -> str:
    values = ", ".join(f"{field.rpartition('.')[2]} {value:g}" for field, value in point.items())
    return f"{task}, {name}, {values}, seed {unit.seed}"
