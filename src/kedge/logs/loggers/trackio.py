"""Trackio: a database on this machine, in `TRACKIO_DIR` or the Hugging Face cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from typing import Any

import trackio  # pyright: ignore[reportMissingImports]

from kedge.logs.loggers.logger import LoggedRun, samples_name
from kedge.logs.samples import Sample

__all__ = ["TrackioLogger"]


class TrackioLogger:
    """Rows by update and tables of samples, in the project's database.

    Args:
        run: The run to log. A resumed run is found by its name.
    """

    def __init__(self, run: LoggedRun) -> None:
        with _quiet():
            self._run = trackio.init(
                run.project,
                name=run.name,
                config=dict(run.settings),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    @property
    def last_update(self) -> None:
        """None, see `Logger.last_update`."""

    def write(self, update: int, metrics: Mapping[str, Any]) -> None:
        """Log metrics as a row."""
        self._run.log(dict(metrics), step=update)

    def write_samples(self, update: int, samples: Sequence[Sample]) -> None:
        """Log responses as a table."""
        rows = [[sample.prompt, sample.response, sample.score] for sample in samples]
        table = trackio.Table(columns=["prompt", "response", "score"], data=rows)
        self._run.log({samples_name(samples): table}, step=update)

    def close(self) -> None:
        """Finish the run, waiting for the thread that writes its rows."""
        with _quiet():
            trackio.finish()


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress Trackio's greeting on standard output, where results go."""
    with redirect_stdout(StringIO()):
        yield
