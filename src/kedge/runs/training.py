"""The training of a stage: its loop with checkpoints, logs and callbacks, and a clean end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from torch import nn

from kedge.config import Config, best_metric
from kedge.logs.details import DETAILS_FILE
from kedge.logs.evaluations import CRITIC_CHECKS_FILE, EVALUATIONS_FILE
from kedge.logs.incidents import truncate_incidents
from kedge.logs.json_lines import plain_json, truncate_rows
from kedge.logs.loggers import LoggedRun, LoggerGroup, LoggerState
from kedge.logs.metrics import METRICS_FILE, MetricsLog
from kedge.logs.progress import Progress, say
from kedge.logs.samples import SAMPLES_FILE
from kedge.runs.ending import leave_stage_report, resumable
from kedge.runs.out_of_memory import memory_in_one_line
from kedge.runs.run import Run, offloads_optimizer
from kedge.system.output import CHECKPOINTS
from kedge.system.ranks import AdaptiveTokens
from kedge.training.checkpoint.loop import CheckpointedLoop, SaveSchedule
from kedge.training.checkpoint.model_folder import CheckpointModel
from kedge.training.checkpoint.state import BestUpdate
from kedge.training.stopping import stopping
from kedge.training.supervised.loop import Outcome

__all__ = [
    "Callback",
    "Update",
    "Watcher",
    "end_training",
    "logged_steps",
    "open_loggers",
    "stage_loop",
    "started_stage",
    "supervised_training",
    "training_loop",
]


@dataclass(frozen=True)
class Update:
    """A complete update of PPO, or an optimizer step of sft, reward and critic, as a callback sees it.

    Attributes:
        stage: `sft`, `reward`, `critic`, `ppo` or `control`.
        number: The update's number, from 1.
        num_updates: Updates of the whole run.
        metrics: Its row of `metrics.jsonl`; read-only.
        folder: The run's folder, whose files include the row.
        model: The trained model with its current weights: the transformers model of the policy, the reward model or
            the critic; in control, the networks. It may be read, and a policy sampled from; what is changed in it is
            trained on.
        tokenizer: Its tokenizer; None in control.
    """

    stage: str
    number: int
    num_updates: int
    metrics: Mapping[str, float]
    folder: Path
    model: nn.Module
    tokenizer: Any
    _loop: CheckpointedLoop

    def stop(self, reason: str = "a callback stopped it") -> None:
        """End the run after this update, as if it were complete: the model is saved, `finished.json` has the reason."""
        self._loop.request_end(reason)


Callback: TypeAlias = Callable[[Update], object]
"""Called with each update; what it returns is ignored, and what it raises ends the run."""


@dataclass(frozen=True)
class Watcher:
    """A callback with what it gets to see.

    Attributes:
        callback: The user's function; None for none.
        model: The trained model.
        tokenizer: Its tokenizer; None if it has none.
    """

    callback: Callback | None
    model: nn.Module
    tokenizer: Any = None

    def see(
        self,
        loop: CheckpointedLoop,
        number: int,
        metrics: Mapping[str, float],
        *,
        stage: str,
        num_updates: int,
        folder: Path,
    ) -> None:
        """Call the callback with an update, which is complete: what the callback raises does not undo it."""
        if self.callback is not None:
            loop.complete(number)
            known = MappingProxyType(dict(metrics))
            update = Update(stage, number, num_updates, known, folder, self.model, self.tokenizer, loop)
            loop.on_first_rank(lambda: self.callback and self.callback(update))


def open_loggers(config: Config, run: Run, *, warn: Callable[[str], None]) -> LoggerGroup:
    """The loggers of a started run; each one is opened with its first row.

    Args:
        config: The resolved configuration.
        run: The run.
        warn: Prints a warning line.
    """
    state = LoggerState(run.folder)
    facts = {name: str(fact) for name, fact in run.facts.items()}
    settings = plain_json({**config.model_dump(mode="json"), "facts": facts})
    logged = LoggedRun(run.folder, run.stage, config.runtime.project, state.id, settings)
    return LoggerGroup(config.runtime.loggers if run.ranks.is_first else [], state, logged, warn=warn)


LOGS = (METRICS_FILE, DETAILS_FILE, SAMPLES_FILE, EVALUATIONS_FILE, CRITIC_CHECKS_FILE)
"""The logs whose rows a resumed run writes again from its checkpoint on."""


@contextmanager
def stage_loop(config: Config, run: Run, *, model: CheckpointModel) -> Iterator[CheckpointedLoop]:
    """The loop over a stage's steps; truncates the logs to the step that the run resumes from.

    Args:
        config: The stage's configuration.
        run: The stage's run, started.
        model: The trained model, for the checkpoints.

    Raises:
        ModelError: The model cannot be saved.
        KeyboardInterrupt, Terminated: The run was interrupted; it is saved.
        OutOfMemoryError: Memory ran out; the state after the last whole step is saved.
    """
    run.ranks.first(lambda: model.try_saving(run.folder))
    # Samples of "update 0" precede the first update: a run that starts over writes them again.
    last = (run.checkpoint.update if run.checkpoint else 0) or -1
    for name in LOGS:
        truncate_rows(run.folder / name, last)
    truncate_incidents(run.folder, last)
    with stopping(ranks=run.ranks) as stop:
        loop = CheckpointedLoop(
            run.shared_folder / CHECKPOINTS,
            kind=run.stage,
            fingerprint=run.fingerprint,
            schedule=SaveSchedule(every=config.checkpoint.every, every_minutes=config.checkpoint.every_minutes),
            keep=config.checkpoint.keep,
            stop=stop,
            found=run.checkpoint,
            model=model,
            best=_best(config, run.stage),
            keep_last=config.checkpoint.keep_last,
            sharded_above=config.checkpoint.sharded_above,
            warn=say,
            ranks=run.ranks,
        )
        if isinstance(run.micro_batch_tokens, AdaptiveTokens):
            loop.register("micro_batch_tokens", run.micro_batch_tokens, optional=True)
        with memory_in_one_line(config, run.stage), loop:
            yield loop


@contextmanager
def logged_steps(
    config: Config, run: Run, loop: CheckpointedLoop, num_steps: int, *, shown: tuple[str, ...]
) -> Iterator[Callable[[int, Mapping[str, float]], None]]:
    """A callback that writes a step's metrics to `metrics.jsonl` and updates the progress display.

    Args:
        config: The stage's configuration.
        run: The stage's run.
        loop: Its loop.
        num_steps: Steps of the whole stage.
        shown: Names of the metrics to display, if the step has them.
    """
    with (
        Progress(run.stage, total=num_steps, done=loop.done) as progress,
        open_loggers(config, run, warn=progress.say) as loggers,
        MetricsLog(run.folder, also=loggers.write if loggers else None) as log,
    ):
        loop.sync_before_saving(run, log)

        def on_step(step: int, metrics: Mapping[str, float]) -> None:
            log.write(step, metrics)
            loop.observe(step, metrics)
            progress.update(step, {name: metrics[name] for name in shown if name in metrics})

        yield on_step


def _best(config: Config, stage: str) -> BestUpdate | None:
    """The tracker of the best update; None for a stage that has no such metric."""
    metric = best_metric(config, stage)
    return None if metric is None else BestUpdate(metric.name, metric.higher_is_better, metric.is_kept)


@contextmanager
def started_stage(config: Config, run: Run) -> Iterator[None]:
    """Start the run; if the block fails, say how to resume it, or leave no folder without results.

    Args:
        config: The stage's configuration.
        run: The stage's run, opened, not started.

    Raises:
        OutputError: The run's folder cannot be created.
    """
    with resumable(config, run.folder, run.stage), run.started():
        yield


@contextmanager
def training_loop(
    config: Config, run: Run, num_steps: int, *, model: CheckpointModel, watcher: Watcher, shown: tuple[str, ...]
) -> Iterator[dict[str, Any]]:
    """The arguments of a started run for `train_supervised`.

    Args:
        config: The stage's configuration.
        run: The stage's run, started.
        num_steps: Optimizer steps of the stage.
        model: The trained model, for the checkpoints.
        watcher: The user's callback.
        shown: Names of the metrics in the progress display.
    """
    with (
        stage_loop(config, run, model=model) as loop,
        logged_steps(config, run, loop, num_steps, shown=shown) as log_step,
    ):

        def on_step(step: int, metrics: Mapping[str, float]) -> None:
            log_step(step, metrics)
            watcher.see(loop, step, metrics, stage=run.stage, num_updates=num_steps, folder=run.shared_folder)

        yield {
            "precision": run.precision,
            "seed": config.runtime.seed,
            "micro_batch_tokens": run.micro_batch_tokens,
            "offload_optimizer": offloads_optimizer(config, run.device),
            "on_step": on_step,
            "loop": loop,
            "ranks": run.ranks,
        }


@contextmanager
def supervised_training(
    config: Config, run: Run, num_steps: int, *, model: CheckpointModel, watcher: Watcher, shown: tuple[str, ...]
) -> Iterator[dict[str, Any]]:
    """Start the run and yield its arguments for `train_supervised`; see `started_stage` and `training_loop`."""
    with (
        started_stage(config, run),
        training_loop(config, run, num_steps, model=model, watcher=watcher, shown=shown) as training,
    ):
        yield training


def end_training(config: Config, run: Run, outcome: Outcome) -> None:
    """Write the report, then re-raise the interruption, if any. Call it after the model is saved.

    Raises:
        KeyboardInterrupt, Terminated: Training was interrupted.
    """
    leave_stage_report(config, run.folder, interrupted=outcome.interruption is not None)
    if outcome.interruption is not None:
        raise outcome.interruption
