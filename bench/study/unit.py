"""One run of the study, and what is kept of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.processes import BenchError
from kedge_base.run_folder.output import replace_file


@dataclass(frozen=True)
class Budget:
    """The least that a run spends.

    Attributes:
        tokens: Sampled tokens.
        flops: FLOPs of all phases of the updates; evaluations and judges are not counted.
    """

    tokens: float
    flops: float

    def share(self, part: float) -> Budget:
        """A part of both."""
        return Budget(self.tokens * part, self.flops * part)

    def is_spent(self, *, tokens: float, flops: float) -> bool:
        """True if both are spent."""
        return tokens >= self.tokens and flops >= self.flops


@dataclass(frozen=True)
class Unit:
    """A run: a task, settings and a seed.

    Attributes:
        task: The task's name.
        settings: By dotted name.
        seed: Of the run.
        budget: When it ends.
    """

    task: str
    settings: Mapping[str, Any]
    seed: int
    budget: Budget

    @property
    def responses(self) -> int:
        """Responses per update."""
        return int(self.settings["rollout.num_prompts"]) * int(self.settings.get("rollout.num_responses", 1))

    @property
    def key(self) -> str:
        """The same for the same run, whichever part of the study asks for it."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Outcome:
    """The record of a run. The lists have one entry per evaluation on held-out prompts; the first is the start's.

    Attributes:
        key: The unit's.
        task: The task's name.
        seed: The run's seed.
        start: Hash of the weights that it started from.
        updates: Updates completed.
        tokens: Tokens sampled so far.
        flops: FLOPs so far.
        scores: Mean score on the held-out prompts.
        explained: Mean explained variance of the updates since the last evaluation; None without a critic.
        seconds: Duration, without the start of the process.
        cpu_seconds: Time of its one thread.
        last: Other metrics of the last update.
        checks: The metrics `critic/…` of every check of the critic during the run.
    """

    key: str
    task: str
    seed: int
    start: str
    updates: Sequence[int]
    tokens: Sequence[float]
    flops: Sequence[float]
    scores: Sequence[float]
    explained: Sequence[float | None]
    seconds: float
    cpu_seconds: float
    last: Mapping[str, float] = field(default_factory=dict)
    checks: Sequence[Mapping[str, float]] = ()

    def score_at(self, axis: str, spent: float) -> float:
        """The held-out score after a given cost, interpolated between evaluations.

        Args:
            axis: `tokens` or `flops`.
            spent: The cost.

        Raises:
            BenchError: The run has spent less.
        """
        places: Sequence[float] = getattr(self, axis)
        if spent > places[-1]:
            raise BenchError(f"run {self.key} ended at {places[-1]:.3g} {axis}, before {spent:.3g}")
        return float(np.interp(spent, places, self.scores))

    def spent_until(self, axis: str, score: float) -> float:
        """The cost when the score was reached for the first time, interpolated; infinite if it never was.

        Args:
            axis: `tokens` or `flops`.
            score: Of the held-out prompts.
        """
        reached = next((number for number, each in enumerate(self.scores) if each >= score), None)
        if reached is None:
            return float("inf")
        around = slice(max(reached - 1, 0), reached + 1)
        return float(np.interp(score, self.scores[around], getattr(self, axis)[around]))

    def tokens_at(self, flops: float) -> float:
        """The tokens sampled after a given number of FLOPs, interpolated between evaluations."""
        return float(np.interp(flops, self.flops, self.tokens))

    @property
    def explained_late(self) -> float | None:
        """The mean explained variance of the last quarter; None without a critic."""
        known = [each for each in self.explained if each is not None]
        late = known[-max(1, len(known) // 4) :]
        return float(np.mean(late)) if late else None

    def checked(self, figure: str) -> float | None:
        """A figure of the prefix test, such as `pairs_within`: its mean over the run's checks; None without any."""
        known = [check[name] for check in self.checks if (name := f"critic/{figure}") in check]
        return float(np.mean(known)) if known else None


def append_outcome(outcome: Outcome, record: Path) -> None:
    """Add a run to the record, which has one line per run and is replaced as a whole: no line is ever cut off."""
    record.parent.mkdir(parents=True, exist_ok=True)
    before = record.read_bytes() if record.is_file() else b""
    line = json.dumps(_rounded(asdict(outcome)), ensure_ascii=False) + "\n"
    replace_file(record, [before, line.encode()])


def read_outcomes(record: Path) -> dict[str, Outcome]:
    """The recorded runs by key; none if there is no file.

    Raises:
        BenchError: Runs of a task started from different weights.
    """
    lines = record.read_text(encoding="utf-8").splitlines() if record.is_file() else []
    outcomes = [Outcome(**json.loads(line)) for line in lines]
    starts: dict[str, str] = {}
    for outcome in outcomes:
        if starts.setdefault(outcome.task, outcome.start) != outcome.start:
            raise BenchError(
                f"{record}: runs of {outcome.task} started from different weights, {starts[outcome.task]} and "
                f"{outcome.start}; remove one kind"
            )
    return {outcome.key: outcome for outcome in outcomes}


def _rounded(value: Any) -> Any:
    """Numbers with six digits: enough for a table, and half the size."""
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(each) for each in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
