"""How every stage begins and what it shows on its way: a folder, a device, a row of metrics per step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from kedge.config import Config, check_stage, choose_output, resolved_yaml, with_values
from kedge.models import model_width, resolve_precision
from kedge.output import LEFT_BEHIND, REJECTED_FILE, writing
from kedge.report.metrics import MetricsLog
from kedge.report.progress import Progress
from kedge.report.run_folder import create_run_folder, take_back_folder, write_config
from kedge.training.runtime import keep_freed_memory, resolve_device, seed_everything, set_threads

__all__ = ["REJECTED_FILE", "Run", "logged_steps", "open_run"]

IN_MEMORY = "python:in_memory"
"""What stands in `config.yaml` for data or functions that no configuration can name."""


@dataclass(frozen=True)
class Run:
    """Where a stage runs and writes.

    Attributes:
        folder: The run's folder; `start` makes it.
        device: Where the models live.
        precision: Number format of the matrix products.
        config_text: What `config.yaml` will hold.
        facts: What stands above it: the stage, the device and the versions that ran.
    """

    folder: Path
    device: torch.device
    precision: Literal["fp32", "bf16"]
    config_text: str
    facts: Mapping[str, object]

    def start(self) -> None:
        """Make the folder, with `config.yaml` in it: everything is loaded and fits, the work begins.

        A mistake that shows before this leaves nothing behind, so that its mended command can be run again as it is.

        Raises:
            OutputError: The folder cannot be made, or something was put into it since the run was opened.
        """
        create_run_folder(self.folder)
        write_config(self.folder, self.config_text, self.facts)

    def abandon(self) -> None:
        """Take back what `start` made, if the work has left nothing: no row of a log, and no file beside them.

        The same command, mended, can then be run again as it is. Rejected rows stay.
        """
        take_back_folder(self.folder)

    @contextmanager
    def started(self) -> Iterator[None]:
        """`start` for a block of work; `abandon` where it ends by an error.

        Raises:
            OutputError: As `start`.
        """
        self.start()
        try:
            yield
        except BaseException:  # Ctrl-C, too: whatever ends the work, it is raised again
            self.abandon()
            raise


def open_run(config: Config, stage: str, *, given: Mapping[str, object] | None = None) -> Run:
    """Check what the stage needs and that its folder is free, set up the machine, and seed it.

    Args:
        config: The resolved configuration.
        stage: Which one runs: its name names the folder, too, unless `out` does.
        given: What Python handed over in place of configured fields, by dotted name; None where it did not.

    Raises:
        ConfigError: A field that the stage needs is missing, or the device is not there.
        OutputError: The folder holds something already, or cannot be made.
    """
    handed_over = [name for name, value in (given or {}).items() if value is not None]
    config = with_values(config, dict.fromkeys(handed_over, IN_MEMORY)) if handed_over else config
    check_stage(config, stage)
    folder = choose_output(config.out, stage)
    device = resolve_device(config.runtime.device)
    source = config.reward_model.base or config.model if stage == "reward" else config.model
    width = model_width(str(source), trust_remote_code=config.runtime.trust_remote_code)
    precision = resolve_precision(config.runtime.precision, device, width=width)
    keep_freed_memory()
    set_threads(config.runtime.num_threads)
    seed_everything(config.runtime.seed)
    facts = {"stage": stage, "device": device, "precision": precision}
    # What an earlier run ended at; this run begins anew.
    for path in (folder / name for name in sorted(LEFT_BEHIND)):
        with writing(path):
            path.unlink(missing_ok=True)
    return Run(folder, device, precision, resolved_yaml(config), facts)


@contextmanager
def logged_steps(
    stage: str, *, num_steps: int, folder: Path, shown: tuple[str, ...]
) -> Iterator[Callable[[int, Mapping[str, float]], None]]:
    """A callback that writes a step's metrics to `metrics.jsonl` and shows some of them with the time to come.

    Args:
        stage: What is running.
        num_steps: Steps of the whole stage.
        folder: The run's folder.
        shown: Names of the metrics to show; those that a step lacks are left out.
    """
    with Progress(stage, total=num_steps) as progress, MetricsLog(folder) as log:

        def on_step(step: int, metrics: Mapping[str, float]) -> None:
            log.write(step, metrics)
            progress.update(step, {name: metrics[name] for name in shown if name in metrics})

        yield on_step
