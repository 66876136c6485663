"""A sweep: settings × seeds ─▶ runs, a few at a time ─▶ sweep.json, a table, one report.

The runs are every combination of the listed values, or random draws, each with every seed. Running the same command
again continues the sweep: finished runs are kept, interrupted ones are resumed.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kedge.config import (
    Config,
    changed_settings,
    effective_settings,
    field_advice,
    load_config,
    preset_conflicts,
    resolved_yaml,
    suggestion,
    with_values,
)
from kedge.logs.table import print_table
from kedge.runs.claim import claim, claims
from kedge.runs.fingerprint import input_hashes_of_all
from kedge.runs.names import check_names
from kedge.runs.resuming import changed_since
from kedge.training.runtime import Terminated, resolve_device, stopping
from kedge_base.errors import ConfigError, KedgeError
from kedge_base.intervals import Interval
from kedge_base.machine.control_groups import available_cores
from kedge_base.machine.invocation import as_argument, is_command_line, refuse_nested_run
from kedge_base.machine.progress import Progress, format_figure, say
from kedge_base.run_folder.output import (
    FINISHED_FILE,
    SWEEP_FILE,
    check_creatable,
    check_output,
    is_sweep,
    replace_file,
    writing,
)
from kedge_base.run_folder.record_format import METRICS_FILE, read_metrics
from kedge_base.texts import counted, printable
from kedge_inspect.report import write_report
from kedge_inspect.sweeps import Goal, Row, compare, find_goal, last_line, leaders, metrics_in, read_sweep

POLL_SECONDS = 0.1

GRACE_SECONDS = 120.0
"""Seconds that a stopped trial gets to save a checkpoint."""

LOG_RATIO = 10
"""A positive range that spans at least this factor is sampled on a log scale."""

MAX_NAME = 120
"""Maximum characters of a folder's name, without the seed."""

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})")
"""Values to draw from, such as `1e-6..1e-4`."""


@dataclass(frozen=True)
class Trial:
    """One run of a sweep.

    Attributes:
        name: Name of its folder.
        values: The values of the swept fields, as on the command line.
        seed: Its `runtime.seed`.
        config: Its whole configuration, without `out`.
    """

    name: str
    values: Mapping[str, str]
    seed: int
    config: Config


@dataclass(frozen=True)
class SweepResult:
    """The result of a sweep.

    Attributes:
        folder: Its folder, with one run's folder per trial.
        goal: The metric that runs were compared by; None if no run has a result.
        rows: The results by setting, the best first.
        failed: Names of the runs that failed.
    """

    folder: Path
    goal: Goal | None
    rows: Sequence[Row]
    failed: Sequence[str]


@claims()
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
        stage: The stage to sweep.
        folder: The sweep's folder: new, empty, or that of the same sweep.
        num_processes: Runs at a time; None for one per core on a CPU, one on a GPU.
        metric: The metric to compare by; None for the stage's usual one.
        goal: `max` or `min`; None to go by the metric's name.

    Raises:
        KedgeError: The folder contains something else or is in use, or no run has the metric. A missing metric is
            reported after the first run, and raised after the table, which shows the stage's usual metric instead.
        KeyboardInterrupt, Terminated: The sweep was interrupted; the same command continues it.
    """
    refuse_nested_run()
    folder = check_creatable(folder) if is_sweep(folder) else check_output(folder)
    for trial in trials:
        check_names(trial.config, stage)
    count = num_processes or _default_processes(trials[0])
    content = {
        "stage": stage,
        "metric": metric,
        "goal": goal,
        "runs": [{"name": trial.name, "values": dict(trial.values), "seed": trial.seed} for trial in trials],
    }
    _prepare(trials, folder)
    _write(folder, content)
    settings = len({tuple(trial.values.items()) for trial in trials})
    seeds = len(trials) // settings
    per_setting = f" × {seeds} seeds" if seeds > 1 else ", one seed each"
    runs = f"{counted(len(trials), 'run')} ({counted(settings, 'setting')}{per_setting})"
    say(f"{runs}, {count} at a time, in {folder}")
    for line in dict.fromkeys(preset_conflicts(trial.config, stage) for trial in trials):
        if line is not None:
            say(line)
    errors: dict[str, str] = {}
    with Progress("sweep", total=len(trials)) as progress:
        done = 0
        is_said = False

        def on_ended(trial: Trial, exit_code: int) -> None:
            nonlocal done, is_said
            done += 1
            if exit_code:
                errors[trial.name] = _error(exit_code, folder / "logs" / f"{trial.name}.log")
                _write(folder, {**content, "failed": list(errors), "errors": errors})
                progress.say(f"{trial.name} failed: {errors[trial.name]}")
            elif not is_said and (hint := _missing(metric, [folder / each.name for each in trials])):
                progress.say(f"{hint} so far; if none has it in the end, another metric compares them")
                is_said = True
            progress.update(done)

        try:
            run_trials(trials, folder, stage, num_processes=count, on_ended=on_ended)
        except (KeyboardInterrupt, Terminated):
            again = "command" if is_command_line() else "call"
            progress.say(f"Resume: the same {again} continues the sweep in {printable(str(folder))}")
            raise
    return _finish(folder, {**content, "failed": list(errors), "errors": errors})


def _missing(metric: str | None, folders: Sequence[Path]) -> str | None:
    """The error for a metric that no run has so far; None if a run has it, or no metric was requested."""
    known = metrics_in(row for folder in folders if (folder / METRICS_FILE).is_file() for row in read_metrics(folder))
    if metric is None or not known or metric in known:
        return None
    hint = suggestion(metric, known) or f"; they have {', '.join(known)}"
    return f"{as_argument('--metric', 'metric')}: the runs have no {metric}{hint}"


def _error(exit_code: int, log: Path) -> str:
    """Return why a trial failed: the last line of its log, or the signal that killed it, which leaves no line."""
    if exit_code >= 0:
        return last_line(log)
    return f"killed by {signal.Signals(-exit_code).name}"


def _prepare(trials: Sequence[Trial], folder: Path) -> None:
    """Write each trial's configuration; reject a changed configuration, or changed inputs of a finished trial.

    The inputs of an unfinished trial may change: it has failed, or resuming checks them.
    """
    all_hashes = input_hashes_of_all([trial.config for trial in trials])
    with writing(folder):
        for name in ("configs", "logs"):
            (folder / name).mkdir(parents=True, exist_ok=True)
    claim(folder)
    for trial, hashes in zip(trials, all_hashes, strict=True):
        if (folder / trial.name / FINISHED_FILE).is_file():
            for line in changed_since(folder / trial.name, hashes):
                raise ConfigError(
                    f"{folder} holds {trial.name}, which has finished, and {line}; choose another "
                    f"{as_argument('--out')}, or delete it"
                )
        path = folder / "configs" / f"{trial.name}.yaml"
        config = with_values(trial.config, {"out": None})
        if path.is_file() and (changes := changed_settings(*effective_settings(load_config(path), config))):
            raise ConfigError(
                f"{folder} holds a sweep with other settings ({path.name}: {'; '.join(changes)}); choose another "
                f"{as_argument('--out')}, or delete it"
            )
        replace_file(path, [resolved_yaml(config).encode()])


def _write(folder: Path, content: Mapping[str, Any]) -> None:
    replace_file(folder / SWEEP_FILE, [json.dumps(content, indent=2, ensure_ascii=False).encode()])


def _default_processes(trial: Trial) -> int:
    """One process per core on a CPU; one on a GPU, where several would share its memory."""
    return available_cores() if resolve_device(trial.config.runtime.device).type == "cpu" else 1


def run_trials(
    trials: Sequence[Trial],
    folder: Path,
    stage: str,
    *,
    num_processes: int,
    on_ended: Callable[[Trial, int], None],
) -> None:
    """Run each trial as `kedge STAGE` in `folder/NAME`; a started one is resumed, a finished one is unchanged.

    Ctrl-C and SIGTERM stop all trials, which save checkpoints, and are raised again.

    Args:
        trials: The runs.
        folder: The sweep's folder, with `configs/NAME.yaml` for each.
        stage: The stage.
        num_processes: Number of runs at a time; they share the cores evenly.
        on_ended: Called with each trial and its exit code when it ends.

    Raises:
        KeyboardInterrupt, Terminated: The sweep was interrupted.
        OutputError: A log cannot be written.
    """
    waiting = [trial for trial in trials if not (folder / trial.name / FINISHED_FILE).is_file()]
    for trial in trials:
        if trial not in waiting:
            on_ended(trial, 0)
    running: dict[subprocess.Popen[bytes], Trial] = {}
    with stopping(GRACE_SECONDS) as stop, ExitStack() as left_behind:
        left_behind.callback(_end, running)
        while waiting or running:
            while waiting and len(running) < num_processes and not stop.requested:
                trial = waiting.pop(0)
                running[_start(trial, folder, stage, num_processes)] = trial
            if stop.requested:
                _end(running)
                stop.raise_if_requested()
            time.sleep(POLL_SECONDS)
            for process in [process for process in running if process.poll() is not None]:
                on_ended(running.pop(process), process.returncode)


def _start(trial: Trial, folder: Path, stage: str, num_processes: int) -> subprocess.Popen[bytes]:
    config = folder / "configs" / f"{trial.name}.yaml"
    out = folder / trial.name
    command = [sys.executable, "-m", "kedge", stage, "--config", config, "--out", out, "--resume", "auto"]
    threads = str(max(1, available_cores() // num_processes))
    environment = {"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "passive", **os.environ}
    log = folder / "logs" / f"{trial.name}.log"
    with writing(log), log.open("ab") as output:
        # A separate session: Ctrl-C reaches only the sweep, which then stops the trials properly.
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
        )


def _end(running: dict[subprocess.Popen[bytes], Trial]) -> None:
    """Stop the trials that are still running."""
    for process in running:
        process.terminate()
    for process in running:
        try:
            process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    running.clear()


def _finish(folder: Path, content: Mapping[str, Any]) -> SweepResult:
    """Compare the finished runs, save and print the results, and write the report."""
    sweep = read_sweep(folder)
    finished = {run.name: read_metrics(run.folder) for run in sweep.runs if (run.folder / FINISHED_FILE).is_file()}
    rows = [row for metrics in finished.values() for row in metrics]
    if not rows:
        raise KedgeError(f"no run of the sweep has finished; see {folder / 'logs'}")
    known = metrics_in(rows)
    goal = find_goal(sweep.stage, known, sweep.metric, sweep.goal) or find_goal(sweep.stage, known, None, None)
    if goal is None:
        raise KedgeError(f"the runs have nothing to compare them by; they have {', '.join(known) or 'no metrics'}")
    results = compare(sweep.settings, finished, goal)
    _write(folder, {**content, **asdict(goal), "results": [_as_json(row) for row in results]})
    _print(results, goal)
    if best := leaders(results):
        model = next(run.folder / "model" for run in best[0].setting.runs if run.name in finished)
        tied = f"{len(best)} of {len(results)} settings tie; the first of them: " if len(best) > 1 else ""
        say(f"Best: {tied}{model}")
    say(f"Report: {write_report([folder], advice=field_advice)}")
    if hint := _missing(sweep.metric, [folder / name for name in finished]):
        raise ConfigError(hint)
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
    if interval is None:
        return None
    value, low, high = map(format_figure, (interval.value, interval.low, interval.high))
    return f"{value} ({low} to {high})" if interval.is_known else value


def _as_json(row: Row) -> dict[str, Any]:
    """Convert a row to JSON, which has no NaN."""
    interval = None if row.interval is None else row.interval.as_json()
    return {"setting": row.label, "values": list(row.values), "interval": interval, "kl": row.kl}


def plan_trials(
    swept: Mapping[str, Sequence[str]],
    seeds: Sequence[int] | None,
    resolve: Callable[[Mapping[str, Any]], Config],
    *,
    num_random: int | None = None,
) -> list[Trial]:
    """Plan all runs of a sweep, each with a checked configuration.

    Args:
        swept: The values of each swept field: a list, or one range `LOW..HIGH` to draw from.
        seeds: The seeds of each setting, distinct; None for the configured one.
        resolve: The configuration with some fields set.
        num_random: Number of settings to draw; None tries every combination.

    Raises:
        ConfigError: There is nothing to vary, a range without `num_random`, or an invalid value.
    """
    if named := next((field for field in swept if field in ("seed", "runtime.seed")), None):
        given = as_argument("--seeds 0,1,2", "seeds=[0, 1, 2]")
        raise ConfigError(f"{named} is not swept as a field: give the seeds of every setting with {given}")
    if not swept and (seeds is None or len(seeds) < 2):
        raise ConfigError(
            "nothing varies: give a field several values (ppo.learning_rate=1e-5,1e-4), or several "
            f"{as_argument('--seeds', 'seeds')}"
        )
    for field, values in swept.items():
        if num_random is None and any(RANGE.fullmatch(value) for value in values):
            drawn = as_argument("--random N", "num_random=N")
            raise ConfigError(f"{field}={','.join(values)} is a range; add {drawn} to draw N settings from it")
    settings = (
        [dict(zip(swept, values, strict=True)) for values in itertools.product(*swept.values())]
        if num_random is None
        else _draws(swept, num_random)
    )
    if not settings or (seeds is not None and not seeds):
        raise ConfigError("the sweep has no runs: give each field at least one value, and at least one seed")
    if seeds is None:
        seeds = [resolve(settings[0]).runtime.seed]
    trials = [
        Trial(_folder_name(values, seed), values, seed, resolve({**values, "runtime.seed": str(seed)}))
        for values in settings
        for seed in seeds
    ]
    if len({trial.name for trial in trials}) < len(trials):
        raise ConfigError("two runs of the sweep are the same; give each value and each seed once")
    if trials[0].config.push.repo:
        raise ConfigError("a sweep pushes no model: leave push.repo unset, and push the best run with kedge push")
    return trials


def _draws(swept: Mapping[str, Sequence[str]], count: int) -> list[dict[str, str]]:
    """Draw distinct random settings, the same in every call; fewer if there are no more."""
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for attempt in range(20 * count):
        source = random.Random(f"sweep {attempt}")
        values = {field: _draw(choices, source) for field, choices in swept.items()}
        found.setdefault(tuple(values.values()), values)
        if len(found) == count:
            break
    return list(found.values())


def _draw(choices: Sequence[str], source: random.Random) -> str:
    choice = source.choice(choices)
    match = RANGE.fullmatch(choice)
    if match is None:
        return choice
    ends = sorted(match.groups(), key=float)
    low, high = map(float, ends)
    if low == high:
        return ends[0]
    is_whole = all(re.fullmatch(r"[-+]?\d+", end) for end in ends)
    half = 0.5 if is_whole else 0.0  # so that both ends are as likely as the numbers between
    if low > 0 and high / low >= LOG_RATIO:
        value = math.exp(source.uniform(math.log(low - half), math.log(high + half)))
    else:
        value = source.uniform(low - half, high + half)
    # Enough digits to distinguish numbers in a narrow range.
    digits = 3 + max(0, math.floor(-math.log10((high - low) / max(-low, high))))
    text = str(round(value)) if is_whole else f"{value:.{digits}g}"
    return ends[0] if float(text) < low else ends[1] if float(text) > high else text


def _folder_name(values: Mapping[str, str], seed: int) -> str:
    """A trial's folder name, such as `learning_rate=1e-05_kl_coef=0.1_seed=0`; adding seeds does not change it."""
    whole = "_".join(f"{field.rpartition('.')[2]}={value}" for field, value in values.items())
    name = re.sub(r"[^\w.=+-]+", "-", whole).strip("-.") or "run"
    if len(name) > MAX_NAME or re.search(r"[^\w.=+-]", whole):
        digest = hashlib.sha256(repr(sorted(values.items())).encode()).hexdigest()[:8]
        name = f"{name[:MAX_NAME]}_{digest}"
    return f"{name}_seed={seed}"


def split_override(override: str) -> tuple[str, list[str]]:
    """Split `FIELD=VALUE,VALUE,…` into the field and its values, except at commas inside brackets or quotes."""
    field, _, text = override.partition("=")
    values = [""]
    depth = 0
    quote = ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"" and not values[-1][-1:].isalnum():  # not the apostrophe of a word
            quote = letter
        depth += (letter in "[{(") - (letter in "]})") if not quote else 0
        if letter == "," and not quote and depth == 0:
            values.append("")
        else:
            values[-1] += letter
    return field.strip(), [value.strip() for value in values]
