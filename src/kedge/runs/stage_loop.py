"""How a stage is kept: saved on its way, ended cleanly when that is asked, gone on with where it was left."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from kedge.config import Config
from kedge.logs.details import DETAILS_FILE
from kedge.logs.json_lines import truncate_rows
from kedge.logs.metrics import METRICS_FILE, MetricsLog
from kedge.logs.progress import Progress
from kedge.logs.samples import SAMPLES_FILE
from kedge.runs.loggers import open_loggers
from kedge.runs.run import Run
from kedge.training.checkpoint.resume import CHECKPOINTS, Keeper
from kedge.training.checkpoint.save_schedule import SaveSchedule
from kedge.training.stopping import stopping

__all__ = ["keeping", "logged_steps"]


@contextmanager
def keeping(config: Config, run: Run) -> Iterator[Keeper]:
    """A keeper for a stage's steps; the logs are cut back to the step after which it goes on.

    Args:
        config: The stage's configuration.
        run: The stage's run, which has been started.

    Raises:
        KeyboardInterrupt, Terminated: Ctrl-C or SIGTERM came; the run is saved.
    """
    # Samples of "update 0" are from before the first: a run that begins anew makes them, too, once more.
    last = run.checkpoint.update if run.checkpoint else -1
    for name in (METRICS_FILE, DETAILS_FILE, SAMPLES_FILE):
        truncate_rows(run.folder / name, last)
    with stopping() as asked:
        keeper = Keeper(
            run.folder / CHECKPOINTS,
            kind=run.stage,
            fingerprint=run.inputs,
            schedule=SaveSchedule(every=config.checkpoint.every, every_minutes=config.checkpoint.every_minutes),
            keep=config.checkpoint.keep,
            asked=asked,
            found=run.checkpoint,
        )
        with keeper:
            yield keeper


@contextmanager
def logged_steps(
    config: Config, run: Run, keeper: Keeper, num_steps: int, *, shown: tuple[str, ...]
) -> Iterator[Callable[[int, Mapping[str, float]], None]]:
    """A callback that writes a step's metrics to `metrics.jsonl` and shows some of them with the time to come.

    Args:
        config: The stage's configuration.
        run: What is running.
        keeper: Its keeper.
        num_steps: Steps of the whole stage.
        shown: Names of the metrics to show; those that a step lacks are left out.
    """
    with (
        Progress(run.stage, total=num_steps, done=keeper.done) as progress,
        open_loggers(config, run, warn=progress.say) as loggers,
        MetricsLog(run.folder, also=loggers.write) as log,
    ):
        keeper.sync_before_saving(log)

        def on_step(step: int, metrics: Mapping[str, float]) -> None:
            log.write(step, metrics)
            progress.update(step, {name: metrics[name] for name in shown if name in metrics})

        yield on_step
