"""Reads sweeps from their folder, groups their runs by setting, and compares the settings."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from kedge_base.errors import DataError
from kedge_base.intervals import Interval, mean_interval
from kedge_base.run_folder.output import SWEEP_FILE
from kedge_inspect.page.looks import look_of
from kedge_inspect.page.numbers import numbers_of

MOST_ERROR = 300
"""Maximum characters of a failed run's error."""


@dataclass(frozen=True)
class SweptRun:
    """One run of a sweep, started or not.

    Attributes:
        name: Name of its folder.
        values: The values of the swept fields, as on the command line.
        seed: Its `runtime.seed`.
        folder: Its folder, which may not exist yet.
        error: The reason of a failure: the last line that the run printed, or the signal that ended it; None without a
            failure.
    """

    name: str
    values: Mapping[str, str]
    seed: int
    folder: Path
    error: str | None = None


@dataclass(frozen=True)
class Setting:
    """The runs with the same values and different seeds."""

    values: Mapping[str, str]
    runs: Sequence[SweptRun]

    @property
    def label(self) -> str:
        """The values as on the command line; empty if only the seed varies."""
        return " ".join(f"{field}={value}" for field, value in self.values.items())


@dataclass(frozen=True)
class Sweep:
    """A sweep.

    Attributes:
        folder: Its folder.
        stage: The stage that it runs.
        runs: All its runs, in order.
        metric: The metric to compare by, if it has been chosen.
        goal: `max` or `min`, if it has been chosen.
    """

    folder: Path
    stage: str
    runs: Sequence[SweptRun]
    metric: str | None = None
    goal: str | None = None

    @property
    def settings(self) -> list[Setting]:
        """The runs by setting, in the order of their first run."""
        found: dict[tuple[tuple[str, str], ...], list[SweptRun]] = {}
        for run in self.runs:
            found.setdefault(tuple(run.values.items()), []).append(run)
        return [Setting(dict(values), runs) for values, runs in found.items()]

    @property
    def fields(self) -> list[str]:
        """The fields that vary."""
        return list(dict.fromkeys(field for run in self.runs for field in run.values))


def read_sweep(folder: Path) -> Sweep:
    """Read `sweep.json`, also of a sweep in progress.

    Raises:
        DataError: The file is damaged.
    """
    path = folder / SWEEP_FILE
    try:
        content = json.loads(path.read_bytes())
        errors = {str(name): str(error) for name, error in content.get("errors", {}).items()}
        runs = [_run(folder, each, errors) for each in content["runs"]]
        stage = str(content["stage"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{str(path)!r} is damaged: {type(error).__name__}: {error}") from error
    return Sweep(folder, stage, runs, content.get("metric"), content.get("goal"))


def last_line(log: Path) -> str:
    """The last line of a log: the error of a run that failed without being killed."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    lines = [line for line in text.splitlines() if line.strip()]
    return (lines[-1] if lines else "it printed nothing")[:MOST_ERROR]


def _run(folder: Path, content: Mapping[str, Any], errors: Mapping[str, str]) -> SweptRun:
    name = str(content["name"])
    values = {str(field): str(value) for field, value in content["values"].items()}
    return SweptRun(name, values, int(content["seed"]), folder / name, errors.get(name))


OF_TERMS = ("score", "eval/score")
"""Sections of the metrics that are named after reward terms."""
LOWER_IS_BETTER = ("loss", "kl", "clip_fraction", "error", "perplexity")
KL = "objective/kl"

LAST_SHARE = 0.1
"""Share of a run's rows, the last ones, over which its result is averaged: single updates are noisy."""

EQUAL = 1e-9
"""Relative difference of results up to which settings tie, because of rounding."""


@dataclass(frozen=True)
class Goal:
    """The metric that runs are compared by.

    Attributes:
        metric: A metric of `metrics.jsonl`.
        higher_is_better: Whether the best run has the highest value.
    """

    metric: str
    higher_is_better: bool


@dataclass(frozen=True)
class Row:
    """The result of one setting.

    Attributes:
        setting: The setting.
        values: The results of the seeds that have finished.
        interval: Their mean with its 95 % interval; the ends are NaN with one seed; None without a result.
        kl: The mean KL to the reference, for PPO.
    """

    setting: Setting
    values: Sequence[float]
    interval: Interval | None
    kl: float | None

    @property
    def label(self) -> str:
        """The setting as on the command line."""
        return self.setting.label


def find_goal(stage: str, known: Iterable[str], metric: str | None, goal: str | None) -> Goal | None:
    """Choose the metric to compare by: the one asked for, or the stage's first that the runs have; None without one.

    Args:
        stage: The stage.
        known: The metrics of the runs.
        metric: A metric, or None.
        goal: `max`, `min`, or None to go by the metric's name.
    """
    names = set(known)
    chosen = next((name for name in ([metric] if metric else look_of(stage).goals) if name in names), None)
    if chosen is None:
        return None
    # Reward terms have arbitrary names, and higher is better for each.
    section, _, name = chosen.rpartition("/")
    is_lower = goal == "min" if goal else section not in OF_TERMS and any(word in name for word in LOWER_IS_BETTER)
    return Goal(chosen, higher_is_better=not is_lower)


def metrics_in(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """The metrics that any of the rows has."""
    return sorted({name for row in rows for name in row} - {"update"})


def final_value(rows: Sequence[Mapping[str, Any]], metric: str) -> float | None:
    """The mean of a metric over the last tenth of the rows with a finite value of it; None if none has one."""
    values = numbers_of(rows, metric)
    return mean(values[-math.ceil(LAST_SHARE * len(values)) :]) if values else None


def compare(settings: Sequence[Setting], finished: Mapping[str, Sequence[Mapping[str, Any]]], goal: Goal) -> list[Row]:
    """One row per setting, the best first; settings without a result last.

    Args:
        settings: The settings.
        finished: The metric rows of each finished run, by its name. Results of failed or unfinished runs are not
            compared with the others' final results.
        goal: The metric to compare by.
    """
    rows = [_row(setting, [finished[run.name] for run in setting.runs if run.name in finished], goal)
            for setting in settings]  # fmt: skip
    sign = -1 if goal.higher_is_better else 1
    return sorted(rows, key=lambda row: sign * row.interval.value if row.interval else math.inf)


def leaders(rows: Sequence[Row]) -> list[Row]:
    """The best row and the rows that tie with it; empty if no row has a result.

    Args:
        rows: The result of `compare`.
    """
    best = rows[0].interval if rows else None
    if best is None:
        return []
    return [row for row in rows if row.interval and math.isclose(row.interval.value, best.value, rel_tol=EQUAL)]


def _row(setting: Setting, metrics: Sequence[Sequence[Mapping[str, Any]]], goal: Goal) -> Row:
    values = [value for rows in metrics if (value := final_value(rows, goal.metric)) is not None]
    kls = [value for rows in metrics if (value := final_value(rows, KL)) is not None]
    return Row(setting, values, mean_interval(values) if values else None, mean(kls) if kls else None)
