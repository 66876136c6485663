"""Weights & Biases, offline unless `WANDB_MODE` is set otherwise."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import wandb  # pyright: ignore[reportMissingImports]

from kedge.logs.loggers.logger import LoggedRun, samples_name
from kedge.logs.samples import Sample

__all__ = ["WandbLogger"]


class WandbLogger:
    """History rows by update and a table of samples, in the run's folder; `wandb sync` uploads them.

    A W&B run that the caller has open in this process is left alone.

    Args:
        run: The run to log. Its id is also W&B's, so a resumed run continues the same W&B run.
    """

    def __init__(self, run: LoggedRun) -> None:
        mode: Any = os.environ.get("WANDB_MODE") or "offline"
        is_offline = mode == "offline"
        self._run = wandb.init(
            project=run.project,
            id=run.id,
            name=run.name,
            job_type=run.stage,
            config=dict(run.settings),
            dir=str(run.folder),
            mode=mode,
            # Offline, the id alone identifies the run: `wandb sync` merges runs of one id in order of time.
            resume=None if is_offline else "allow",
            reinit="create_new",
            # Do not capture the terminal: a live progress bar would fill the log.
            settings=wandb.Settings(console="off", silent=is_offline),
        )

    def write(self, update: int, metrics: Mapping[str, Any]) -> None:
        """Log metrics as the row of a step."""
        self._run.log(dict(metrics), step=update)

    def write_samples(self, update: int, samples: Sequence[Sample]) -> None:
        """Log responses as a table."""
        rows = [[update, sample.prompt, sample.response, sample.score] for sample in samples]
        table = wandb.Table(columns=["update", "prompt", "response", "score"], data=rows)
        self._run.log({samples_name(samples): table}, step=update)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()
