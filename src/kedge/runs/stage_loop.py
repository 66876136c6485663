"""The loop of a stage, with resuming, checkpoints, logs, and a clean stop on Ctrl-C or SIGTERM."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from kedge.config import Config, best_metric
from kedge.logs.details import DETAILS_FILE
from kedge.logs.evaluations import CRITIC_CHECKS_FILE, EVALUATIONS_FILE
from kedge.logs.incidents import truncate_incidents
from kedge.logs.json_lines import truncate_rows
from kedge.logs.metrics import METRICS_FILE, MetricsLog
from kedge.logs.progress import Progress, say
from kedge.logs.samples import SAMPLES_FILE
from kedge.runs.loggers import open_loggers
from kedge.runs.out_of_memory import memory_in_one_line
from kedge.runs.run import Run
from kedge.system.output import CHECKPOINTS
from kedge.training.checkpoint.best import BestUpdate
from kedge.training.checkpoint.model_folder import CheckpointModel
from kedge.training.checkpoint.resume import CheckpointedLoop
from kedge.training.checkpoint.save_schedule import SaveSchedule
from kedge.training.stopping import stopping

__all__ = ["logged_steps", "stage_loop"]


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
        MetricsLog(run.folder, also=loggers.write) as log,
    ):
        loop.sync_before_saving(run, log)

        def on_step(step: int, metrics: Mapping[str, float]) -> None:
            log.write(step, metrics)
            loop.see(step, metrics)
            progress.update(step, {name: metrics[name] for name in shown if name in metrics})

        yield on_step


def _best(config: Config, stage: str) -> BestUpdate | None:
    """The tracker of the best update; None for a stage that has no such metric."""
    metric = best_metric(config, stage)
    return None if metric is None else BestUpdate(metric.name, metric.higher_is_better, metric.is_kept)
