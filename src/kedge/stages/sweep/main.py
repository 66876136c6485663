"""A sweep: settings × seeds ─▶ runs, a few at a time ─▶ sweep.json, a table, one report.

Running the same command again continues the sweep: finished runs are kept, interrupted ones are resumed.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kedge.config import field_advice, preset_conflicts, resolved_yaml, with_values
from kedge.errors import ConfigError, KedgeError
from kedge.inspect.report import write_report
from kedge.inspect.sweeps import Goal, Row, choose_goal, compare, last_line, leaders, read_sweep
from kedge.logs.metrics import read_metrics
from kedge.logs.progress import Progress, format_figure, say
from kedge.logs.table import print_table
from kedge.stages.sweep.grid import Trial
from kedge.stages.sweep.processes import num_cores, run_trials
from kedge.system.intervals import Interval
from kedge.system.invocation import refuse_nested_run
from kedge.system.output import FINISHED_FILE, SWEEP_FILE, check_output, is_sweep, replace_file, writing

__all__ = ["SweepResult", "run_sweep"]


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
        stage: One that is swept.
        folder: The sweep's folder: new, empty, or that of the same sweep.
        num_processes: Runs at a time; None for one per core on a CPU, one on a GPU.
        metric: The metric to compare by; None for the stage's usual one.
        goal: `max` or `min`; None to go by the metric's name.

    Raises:
        KedgeError: The folder holds something else, or the first run's metrics have no such metric.
        KeyboardInterrupt, Terminated: The sweep was interrupted; the same command continues it.
    """
    refuse_nested_run()
    if not is_sweep(folder):
        check_output(folder)
    count = num_processes or _default_processes(trials[0])
    content = {"stage": stage, "metric": metric, "goal": goal, "runs": [_described(trial) for trial in trials]}
    _prepare(trials, folder)
    _write(folder, content)
    settings = len({trial.label for trial in trials})
    seeds = len(trials) // settings
    per_setting = f"{settings} settings × {seeds} seeds" if seeds > 1 else f"{settings} settings, one seed each"
    say(f"{len(trials)} runs ({per_setting}), {count} at a time, in {folder}")
    for line in dict.fromkeys(preset_conflicts(trial.config, stage) for trial in trials):
        if line is not None:
            say(line)
    errors: dict[str, str] = {}
    with Progress("sweep", total=len(trials)) as progress:
        done = 0

        def on_ended(trial: Trial, exit_code: int) -> None:
            nonlocal done
            done += 1
            if exit_code:
                errors[trial.name] = _error(exit_code, folder / "logs" / f"{trial.name}.log")
                _write(folder, {**content, "failed": list(errors), "errors": errors})
                progress.say(f"{trial.name} failed: {errors[trial.name]}")
            progress.update(done)

        run_trials(trials, folder, stage, num_processes=count, on_ended=on_ended)
    return _finish(folder, {**content, "failed": list(errors), "errors": errors})


def _prepare(trials: Sequence[Trial], folder: Path) -> None:
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


def _settings(text: str) -> str:
    """A configuration without the comment that has the versions."""
    return "\n".join(line for line in text.splitlines() if not line.startswith("#"))


def _described(trial: Trial) -> dict[str, Any]:
    return {"name": trial.name, "values": dict(trial.values), "seed": trial.seed}


def _error(exit_code: int, log: Path) -> str:
    """Why a trial failed; the last line of one that was killed is no error."""
    if exit_code >= 0:
        return last_line(log)
    known = {each.value: each.name for each in signal.Signals}
    return f"killed by {known.get(-exit_code, f'signal {-exit_code}')}"


def _finish(folder: Path, content: Mapping[str, Any]) -> SweepResult:
    """Compare the finished runs, save and print the results, and write the report."""
    sweep = read_sweep(folder)
    finished = {run.name: read_metrics(run.folder) for run in sweep.runs if (run.folder / FINISHED_FILE).is_file()}
    rows = [row for metrics in finished.values() for row in metrics]
    if not rows:
        raise KedgeError(f"no run of the sweep has finished; see {folder / 'logs'}")
    goal = choose_goal(sweep.stage, rows, sweep.metric, sweep.goal)
    results = compare(sweep.settings, finished, goal)
    _write(folder, {**content, **asdict(goal), "results": [_as_json(row) for row in results]})
    _print(results, goal)
    if best := leaders(results):
        model = next(run.folder / "model" for run in best[0].setting.runs if run.name in finished)
        tied = f"{len(best)} of {len(results)} settings tie; the first of them: " if len(best) > 1 else ""
        say(f"Best: {tied}{model}")
    say(f"Report: {write_report([folder], advice=field_advice)}")
    return SweepResult(folder, goal, results, content["failed"])


def _print(results: Sequence[Row], goal: Goal) -> None:
    cells: Mapping[str, list[float | str | None]] = {
        row.label or "as configured": [_cell(row.interval), row.kl, str(len(row.values))] for row in results
    }
    direction = "highest" if goal.higher_is_better else "lowest"
    seeds = max(len(row.values) for row in results)
    measure = "mean and 95 % interval over seeds" if seeds > 1 else "one seed each, so differences may be noise"
    print_table(
        f"{goal.metric} at the end, {direction} first; {measure}",
        ["setting", goal.metric, "KL", "seeds"],
        cells,
    )


def _cell(interval: Interval | None) -> str | None:
    """`0.112 (0.09 to 0.13)`; without the interval if there was one seed."""
    if interval is None or not interval.is_known:
        return None if interval is None else format_figure(interval.value)
    return f"{format_figure(interval.value)} ({format_figure(interval.low)} to {format_figure(interval.high)})"


def _as_json(row: Row) -> dict[str, Any]:
    """A row as JSON, which has no NaN."""
    interval = None if row.interval is None else row.interval.as_json()
    return {"setting": row.label, "values": list(row.values), "interval": interval, "kl": row.kl}


def _write(folder: Path, content: Mapping[str, Any]) -> None:
    replace_file(folder / SWEEP_FILE, [json.dumps(content, indent=2, ensure_ascii=False).encode()])


def _default_processes(trial: Trial) -> int:
    """One process per core on a CPU; one on a GPU, where several would share its memory."""
    from kedge.training.runtime import resolve_device

    return num_cores() if resolve_device(trial.config.runtime.device).type == "cpu" else 1
