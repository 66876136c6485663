"""Runs the trials of a sweep in processes, a few at a time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kedge.stages.sweep.grid import Trial
from kedge.system.output import FINISHED_FILE, writing
from kedge.training.stopping import stopping

__all__ = ["num_cores", "run_trials"]

POLL_SECONDS = 0.1
GRACE_SECONDS = 120.0
"""Seconds that stopped trials have to save a checkpoint."""


@dataclass(frozen=True)
class _Running:
    """A trial and its process."""

    trial: Trial
    process: subprocess.Popen[bytes]


def num_cores() -> int:
    """Cores that this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run_trials(
    trials: Sequence[Trial],
    folder: Path,
    stage: str,
    *,
    num_processes: int,
    on_ended: Callable[[Trial, int], None],
) -> None:
    """Run each trial as `kedge STAGE` in `folder/NAME`; a started one is resumed, a finished one is left as it is.

    Ctrl-C and SIGTERM stop all trials, which save checkpoints, and are raised again.

    Args:
        trials: The runs.
        folder: The sweep's folder, with `configs/NAME.yaml` for each.
        stage: The stage.
        num_processes: How many run at a time; they share the cores evenly.
        on_ended: Called with each trial and its exit code when it ends.

    Raises:
        KeyboardInterrupt, Terminated: The sweep was interrupted.
        OutputError: A log cannot be written.
    """
    waiting = [trial for trial in trials if not (folder / trial.name / FINISHED_FILE).is_file()]
    for trial in trials:
        if trial not in waiting:
            on_ended(trial, 0)
    running: list[_Running] = []
    with stopping(GRACE_SECONDS) as stop, _none_left_behind(running):
        while waiting or running:
            while waiting and len(running) < num_processes and not stop.requested:
                trial = waiting.pop(0)
                running.append(_Running(trial, _start(trial, folder, stage, num_processes)))
            if stop.requested:
                _end(running)
                stop.raise_if_requested()
            time.sleep(POLL_SECONDS)
            for each in [each for each in running if each.process.poll() is not None]:
                running.remove(each)
                on_ended(each.trial, each.process.returncode)


def _start(trial: Trial, folder: Path, stage: str, num_processes: int) -> subprocess.Popen[bytes]:
    config, out = folder / "configs" / f"{trial.name}.yaml", folder / trial.name
    command = [sys.executable, "-m", "kedge", stage, "--config", config, "--out", out, "--resume", "auto"]
    threads = str(max(1, num_cores() // num_processes))
    environment = {"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "passive", **os.environ}
    log = folder / "logs" / f"{trial.name}.log"
    with writing(log), log.open("ab") as output:
        # A session of its own, so that Ctrl-C reaches the sweep alone, which then stops the trials in order.
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
        )


@contextmanager
def _none_left_behind(running: list[_Running]) -> Iterator[None]:
    """Stop the trials that still run when the block is left."""
    try:
        yield
    finally:
        _end(running)


def _end(running: list[_Running]) -> None:
    for each in running:
        each.process.terminate()
    for each in running:
        try:
            each.process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            each.process.kill()
            each.process.wait()
    running.clear()
