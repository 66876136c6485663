"""Runs the training of a stage: its loop with checkpoints, logs and callbacks, and a clean end."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from torch import nn

from kedge.config import best_metric
from kedge.logs.incidents import truncate_incidents
from kedge.logs.json_lines import MetricsLog, RunLog, plain_json, rows_until
from kedge.logs.loggers import PROJECT, LoggedRun, LoggerGroup, LoggerState
from kedge.ranks import AdaptiveTokens
from kedge.runs.ending import end_stage, resumable
from kedge.runs.out_of_memory import memory_in_one_line
from kedge.runs.receipt import LOGS
from kedge.runs.run import Run
from kedge.training.checkpoint.loop import CheckpointedLoop, SaveSchedule
from kedge.training.checkpoint.model_folder import CheckpointModel
from kedge.training.checkpoint.state import BestUpdate, RunState
from kedge.training.runtime import Stopping, stopping
from kedge_base.errors import ConfigError, KedgeError, OutOfMemoryError
from kedge_base.machine.progress import Progress, say
from kedge_base.run_folder.output import CHECKPOINTS, PROGRESS_FILE, replace_file


@dataclass(frozen=True)
class Update:
    """A complete update of PPO, or an optimizer step of sft, reward and critic, as a callback sees it.

    Attributes:
        stage: `sft`, `reward`, `critic`, `ppo` or `control`.
        number: The update's number, from 1.
        num_updates: Updates of the whole run.
        metrics: Its row of `metrics.jsonl`; read-only.
        folder: The run's folder; its files include the row.
        tokenizer: Its tokenizer; None in control.
    """

    stage: str
    number: int
    num_updates: int
    metrics: Mapping[str, float]
    folder: Path
    tokenizer: Any
    _model: nn.Module | None
    _loop: CheckpointedLoop

    @property
    def model(self) -> nn.Module:
        """The trained model: the transformers model of policy, reward model or critic; in control, the networks.

        It has the current weights, and a callback may read it and sample from a policy. Changes to it take effect in a
        single process; with several ranks, the weights would differ, and the run ends.

        Raises:
            ConfigError: The weights are sharded, so that no rank has all of them.
        """
        if self._model is None:
            raise ConfigError(
                "update.model: with runtime.parallel=shard no rank has the whole weights; use the checkpoints in "
                "update.folder, or runtime.parallel=replicate"
            )
        return self._model

    def stop(self, reason: str = "a callback stopped it") -> None:
        """End the run after this update as if complete: the model is saved, and `finished.json` has the reason."""
        self._loop.request_end(reason)


Callback: TypeAlias = Callable[[Update], object]
"""Called with each update; its result is ignored, and an exception ends the run."""


def check_callback(callback: object) -> None:
    """Check, before a run is opened, that calling its callback runs code.

    Raises:
        ConfigError: It is not a function, or an async one or a generator, whose call runs none of its code.
    """
    if callback is None:
        return
    if not callable(callback):
        raise ConfigError(f"on_update must be a function of an update, not of type {type(callback).__name__}")
    lazy = (inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction)
    if any(is_lazy(called) for is_lazy in lazy for called in (callback, type(callback).__call__)):
        raise ConfigError("on_update is async, or a generator, and would never run; pass a plain function")


def watched(
    callback: Callback | None,
    run: Run,
    loop: CheckpointedLoop,
    num_updates: int,
    *,
    model: nn.Module,
    tokenizer: Any = None,
) -> Callable[[int, Mapping[str, float]], None]:
    """Return a function of an update's number and metrics that calls the user's callback.

    The update is complete by then: an exception in the callback does not undo it.

    Args:
        callback: The user's function, if any.
        run: The run.
        loop: Its loop.
        num_updates: Updates of the whole run.
        model: The trained model.
        tokenizer: Its tokenizer; None for a model without one.
    """
    if callback is None:
        return lambda number, metrics: None
    folder = run.shared_folder

    def after_update(number: int, metrics: Mapping[str, float]) -> None:
        loop.complete(number)
        known = MappingProxyType(dict(metrics))
        whole = None if run.ranks.is_sharded else model
        update = Update(run.stage, number, num_updates, known, folder, tokenizer, whole, loop)
        loop.on_first_rank(lambda: callback(update))

    return after_update


def open_loggers(run: Run, *, warn: Callable[[str], None]) -> LoggerGroup:
    """Create the loggers of a started run; each is opened with its first row."""
    state = LoggerState(run.folder)
    facts = {name: str(fact) for name, fact in run.facts.items()}
    settings = plain_json({**run.config.model_dump(mode="json"), "facts": facts})
    logged = LoggedRun(run.folder, run.stage, PROJECT, state.id, settings)
    loggers: Any = run.config.runtime.loggers if run.ranks.is_first else []
    return LoggerGroup(loggers, state, logged, warn=warn)


@contextmanager
def stage_loop(run: Run, *, model: CheckpointModel, stop: Stopping | None = None) -> Iterator[CheckpointedLoop]:
    """Open the loop over a stage's steps; `restore` truncates the logs to the step that the run resumes from.

    Args:
        run: The stage's run; if it has a checkpoint, `restore` starts it.
        model: The trained model, for the checkpoints.
        stop: Set by signals that the caller listens to; None to listen here.

    Raises:
        ModelError: The model cannot be saved.
        KeyboardInterrupt, Terminated: The run was interrupted; the state after the last complete step is saved, unless
            an optimizer step has followed.
        OutOfMemoryError: Memory ran out; the state after the last complete step is saved.
    """
    checkpoint = run.config.checkpoint
    metric = best_metric(run.config, run.stage)
    run.ranks.first(lambda: model.try_saving(run.folder))

    def begin() -> None:
        # Samples of "update 0" precede the first update: a run that starts over writes them again.
        done = run.checkpoint.update if run.checkpoint else 0
        last = done or -1
        # A damaged log is rejected before anything has changed.
        kept = {path: rows_until(path, last) for name in LOGS if (path := run.folder / name).is_file()}
        run.start()
        for path, rows in kept.items():
            replace_file(path, rows)
        truncate_incidents(run.folder, last)
        run.receipt.begin(run, done)

    with stopping(ranks=run.ranks) if stop is None else nullcontext(stop) as stop:
        state = RunState(
            run.shared_folder / CHECKPOINTS,
            kind=run.stage,
            fingerprint=run.fingerprint,
            keep=checkpoint.keep,
            found=run.checkpoint,
            model=model,
            best=metric and BestUpdate(*metric),
            ranks=run.ranks,
            sharded_above=checkpoint.sharded_above,
        )
        schedule = SaveSchedule(every=checkpoint.every.updates, every_minutes=checkpoint.every.minutes)
        loop = CheckpointedLoop(state, schedule=schedule, stop=stop, keep_last=checkpoint.keep_last, warn=say)
        loop.when_restored(begin)
        loop.record = run.receipt.add
        if isinstance(run.micro_batch_tokens, AdaptiveTokens):
            loop.register("micro_batch_tokens", run.micro_batch_tokens, optional=True)
        with memory_in_one_line(run.config, run.stage), loop:
            yield loop


@contextmanager
def logged_steps(
    run: Run, loop: CheckpointedLoop, num_steps: int, *, shown: tuple[str, ...]
) -> Iterator[Callable[[int, Mapping[str, float]], None]]:
    """Return a callback that writes a step's metrics to `metrics.jsonl` and updates the progress display.

    Args:
        run: The stage's run.
        loop: Its loop.
        num_steps: Steps of the whole stage.
        shown: Names of the metrics to display, if the step has them.
    """
    with (
        Progress(run.stage, total=num_steps, done=loop.done) as progress,
        open_loggers(run, warn=progress.say) as loggers,
        MetricsLog(run.folder, also=loggers.write) as log,
    ):
        loop.when_restored(log.open)
        loop.sync_before_saving(run, log)

        def on_step(step: int, metrics: Mapping[str, float]) -> None:
            log.write(step, metrics)
            loop.observe(step, metrics)
            progress.update(step, {name: metrics[name] for name in shown if name in metrics})

        yield on_step


@contextmanager
def running(run: Run, *, save: Callable[..., object] | None = None) -> Iterator[dict[str, object]]:
    """Start a run, and end it after the block: mark it as finished, print the findings and the next command, push the
    model.

    If the block fails, the line that resumes the run is printed, or the folder is removed if it has no results. A run
    with a checkpoint is started by the loop, once it is restored: if the block fails before, its folder is unchanged.

    Args:
        run: The stage's run, opened but not started.
        save: Saves the model and the report, also after a failure. It is called with `interrupted=` and `model=`, which
            is False if memory ran out, possibly in the middle of a step. None if the block saves them.

    Yields:
        The content of `finished.json`, for the block to fill.

    Raises:
        OutputError: The run's folder cannot be created.
    """
    if run.checkpoint is None:
        run.start()
    summary: dict[str, object] = {}
    has_results = fits = True
    with resumable(run), run.receipt:
        try:
            yield summary
        except BaseException as error:
            fits = not isinstance(error, OutOfMemoryError)
            if save is None or isinstance(error, KedgeError):
                has_results = not run.abandon()
            raise
        finally:
            if save is not None and has_results and run.has_started:
                save(interrupted=not summary, model=fits)
    end_stage(run, summary)


OnPhase: TypeAlias = Callable[[str, int, int], None]
"""Called with a phase's name, the number of completed responses, and their total."""


@contextmanager
def measuring(run: Run) -> Iterator[OnPhase]:
    """Start a run that trains nothing; a signal ends it, with several ranks between two phases.

    Yields:
        A function that appends a row to `progress.jsonl`, for watchers: `phase`, `done`, `total`, and the `seconds`
        since the start.
    """
    path = run.folder / PROGRESS_FILE
    with run.started(), stopping(ranks=run.ranks, at_once=True) as stop, RunLog(path) as log:
        log.open()
        started = time.monotonic()
        numbers = count(1)

        def on_phase(phase: str, done: int, total: int) -> None:
            seconds = round(time.monotonic() - started, 3)
            log.append(next(numbers), {"phase": phase, "done": done, "total": total, "seconds": seconds})
            stop.raise_if_requested()

        yield on_phase
