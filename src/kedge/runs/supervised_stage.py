"""Common parts of the supervised stages: start the run, save checkpoints, log steps, write the report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kedge.config import Config
from kedge.runs.callbacks import Watcher
from kedge.runs.ending import leave_stage_report, resumable
from kedge.runs.run import Run, offloads_optimizer
from kedge.runs.stage_loop import logged_steps, stage_loop
from kedge.training.checkpoint.model_folder import CheckpointModel
from kedge.training.supervised.loop import Outcome

__all__ = ["end_training", "started_stage", "supervised_training", "training_loop"]


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
