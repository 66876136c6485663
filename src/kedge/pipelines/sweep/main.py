"""A sweep: settings × seeds ─▶ runs, a few at a time ─▶ sweep.json, a table, one report.

Running the same command again continues the sweep: finished runs are kept, interrupted ones are resumed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kedge.algorithm.statistics import Interval
from kedge.config import field_advice, resolved_yaml, with_values
from kedge.errors import ConfigError, KedgeError
from kedge.inspect.report import write_report
from kedge.logs.progress import Progress, format_figure, say
from kedge.logs.table import print_table
from kedge.output import FINISHED_FILE, check_output, replace_file, writing
from kedge.pipelines.sweep.grid import Trial
from kedge.pipelines.sweep.processes import num_cores, run_trials
from kedge.pipelines.sweep.results import Goal, Row, choose_goal, read_rows, summarize

__all__ = ["SWEEPABLE", "SWEEP_FILE", "SweepResult", "run_sweep"]

SWEEPABLE = ("sft", "reward", "ppo")
"""The stages that a sweep can run."""

SWEEP_FILE = "sweep.json"
"""The settings and results of a sweep. A folder that contains it is a sweep's."""


@dataclass(frozen=True)
class SweepResult:
    """The result of a sweep.

    Attributes:
        folder: Its folder, with one run's folder per trial.
        goal: What the runs were compared by; None if no run has a result.
        rows: The results by setting, the best first.
        failed: Names of the runs that failed.
    """

    folder: Path
    goal: Goal | None
    rows: Sequence[Row]
    failed: Sequence[str]


def run_sweep(
    trials: Sequence[Trial],
    stage: str,
    folder: Path,
    *,
    num_processes: int | None = None,
    metric: str | None = None,
    goal: str | None = None,
) -> SweepResult:
    """Run the trials and compare them.

    Args:
        trials: The runs; see `plan_trials`.
        stage: sft, reward or ppo.
        folder: The sweep's folder: new, empty, or that of the same sweep.
        num_processes: Runs at a time; None for one per core on a CPU, one on a GPU.
        metric: The metric to compare by; None for the stage's usual one.
        goal: `max` or `min`; None to go by the metric's name.

    Raises:
        KedgeError: The folder holds something else, or the first run's metrics have no such metric.
        KeyboardInterrupt, Terminated: The sweep was interrupted; the same command continues it.
    """
    if not (folder / SWEEP_FILE).is_file():
        check_output(folder)
    count = num_processes or _default_processes(trials[0])
    _prepare(trials, stage, folder)
    settings = len({trial.label for trial in trials})
    say(f"{len(trials)} runs ({settings} settings × {len(trials) // settings} seeds), {count} at a time, in {folder}")
    failed: list[str] = []
    with Progress("sweep", total=len(trials)) as progress:
        done = 0

        def on_ended(trial: Trial, exit_code: int) -> None:
            nonlocal done
            done += 1
            if exit_code:
                failed.append(trial.name)
                progress.say(f"{trial.name} failed: {_last_line(folder, trial)}")
            progress.update(done)

        run_trials(trials, folder, stage, num_processes=count, on_ended=on_ended)
    return _finish(trials, stage, folder, failed, metric, goal)


def _prepare(trials: Sequence[Trial], stage: str, folder: Path) -> None:
    """Write each trial's configuration; refuse one that has changed since the sweep began."""
    with writing(folder):
        for name in ("configs", "logs"):
            (folder / name).mkdir(parents=True, exist_ok=True)
    for trial in trials:
        path = folder / "configs" / f"{trial.name}.yaml"
        text = resolved_yaml(with_values(trial.config, {"out": None}))
        if path.is_file() and _settings(path.read_text(encoding="utf-8")) != _settings(text):
            raise ConfigError(
                f"{folder} holds a sweep with other settings ({path.name} differs); choose another --out, or delete it"
            )
        replace_file(path, [text.encode()])
    _write(folder, {"stage": stage, "runs": [_described(trial) for trial in trials]})


def _settings(text: str) -> str:
    """A configuration without the comment that has the versions."""
    return "\n".join(line for line in text.splitlines() if not line.startswith("#"))


def _described(trial: Trial) -> dict[str, Any]:
    return {"name": trial.name, "values": dict(trial.values), "seed": trial.seed}


def _finish(
    trials: Sequence[Trial], stage: str, folder: Path, failed: Sequence[str], metric: str | None, goal: str | None
) -> SweepResult:
    rows = [row for trial in trials for row in read_rows(folder / trial.name)]
    if not rows:
        raise KedgeError(f"no run of the sweep has a result; see {folder / 'logs'}")
    chosen = choose_goal(stage, rows, metric, goal)
    results = summarize(trials, folder, chosen)
    _write(
        folder,
        {
            "stage": stage,
            **asdict(chosen),
            "runs": [_described(trial) for trial in trials],
            "failed": list(failed),
            "results": [_as_json(row) for row in results],
        },
    )
    _print(results, chosen, trials, folder)
    finished = [folder / trial.name for trial in trials if (folder / trial.name / FINISHED_FILE).is_file()]
    if finished:
        say(f"Report: {write_report(finished, folder / 'report.html', advice=field_advice)}")
    return SweepResult(folder, chosen, results, failed)


def _print(results: Sequence[Row], goal: Goal, trials: Sequence[Trial], folder: Path) -> None:
    cells: Mapping[str, list[float | str | None]] = {
        row.label or "as configured": [_cell(row.interval), row.kl, str(len(row.values))] for row in results
    }
    direction = "highest" if goal.higher_is_better else "lowest"
    print_table(
        f"{goal.metric} at the end, {direction} first; mean and 95 % interval over seeds",
        ["setting", goal.metric, "KL", "seeds"],
        cells,
    )
    best = next(trial for trial in trials if trial.label == results[0].label)
    say(f"Best: {folder / best.name / 'model'}")


def _cell(interval: Interval | None) -> str | None:
    """`0.112 (0.09 to 0.13)`; without the interval if there was one seed."""
    if interval is None or math.isnan(interval.low):
        return None if interval is None else format_figure(interval.value)
    return f"{format_figure(interval.value)} ({format_figure(interval.low)} to {format_figure(interval.high)})"


def _as_json(row: Row) -> dict[str, Any]:
    """A row as JSON, which has no NaN."""
    interval = None if row.interval is None else asdict(row.interval)
    known = {key: None if math.isnan(value) else value for key, value in (interval or {}).items()}
    return {"setting": row.label, "values": list(row.values), "interval": known or None, "kl": row.kl}


def _write(folder: Path, content: Mapping[str, Any]) -> None:
    replace_file(folder / SWEEP_FILE, [json.dumps(content, indent=2, ensure_ascii=False).encode()])


def _last_line(folder: Path, trial: Trial) -> str:
    """The last line that a trial printed, which is its error."""
    log = folder / "logs" / f"{trial.name}.log"
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return (lines[-1] if lines else "it printed nothing")[:300]


def _default_processes(trial: Trial) -> int:
    """One process per core on a CPU; one on a GPU, where several would share its memory."""
    from kedge.training.runtime import resolve_device

    return num_cores() if resolve_device(trial.config.runtime.device).type == "cpu" else 1
