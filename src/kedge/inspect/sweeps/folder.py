"""The folder of a sweep: its runs, their settings and seeds, and which of them failed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kedge.errors import DataError
from kedge.system.output import SWEEP_FILE

__all__ = ["Setting", "Sweep", "SweptRun", "last_line", "read_sweep"]

MOST_ERROR = 300
"""Characters of a failed run's error."""


@dataclass(frozen=True)
class SweptRun:
    """One run of a sweep, started or not.

    Attributes:
        name: Name of its folder.
        values: The values of the swept fields, as on the command line.
        seed: Its `runtime.seed`.
        folder: Its folder, which may not exist yet.
        error: Why it failed: the last line that it printed, or the signal that ended it; None if it did not fail.
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
        is_over: Whether it ended, with or without failed runs.
    """

    folder: Path
    stage: str
    runs: Sequence[SweptRun]
    metric: str | None = None
    goal: str | None = None
    is_over: bool = False

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
        failed = {**dict.fromkeys(content.get("failed", ()), ""), **errors}
        runs = [_run(folder, each, failed) for each in content["runs"]]
        stage = str(content["stage"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{str(path)!r} is damaged: {type(error).__name__}: {error}") from error
    goal = content.get("goal")
    if "higher_is_better" in content:
        goal = "max" if content["higher_is_better"] else "min"
    return Sweep(folder, stage, runs, content.get("metric"), goal, is_over="results" in content)


def last_line(log: Path) -> str:
    """The last line of a log, which is the error of a run that failed by itself."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    lines = [line for line in text.splitlines() if line.strip()]
    return (lines[-1] if lines else "it printed nothing")[:MOST_ERROR]


def _run(folder: Path, content: Mapping[str, Any], failed: Mapping[str, str]) -> SweptRun:
    name = str(content["name"])
    values = {str(field): str(value) for field, value in content["values"].items()}
    # Sweeps of earlier versions name the runs that failed without the reason.
    error = (failed[name] or last_line(folder / "logs" / f"{name}.log")) if name in failed else None
    return SweptRun(name, values, int(content["seed"]), folder / name, error)
