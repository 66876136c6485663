"""Trackio: a database on this machine, in `TRACKIO_DIR` or the Hugging Face cache."""

from __future__ import annotations

from contextlib import redirect_stdout
from io import StringIO

import trackio  # pyright: ignore[reportMissingImports]

from kedge.logs.loggers.logger import LoggedRun, TableLogger


def open_log(run: LoggedRun) -> TableLogger:
    """Open a log of rows and tables of samples in the project's database; a resumed run is found by name."""
    with redirect_stdout(StringIO()):  # no greeting on standard output, where results go
        log = trackio.init(
            run.project,
            name=run.name,
            config=dict(run.settings),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        ).log
    return TableLogger(log, trackio.Table, ("prompt", "response", "score"), close=_finish)


def _finish() -> None:
    """Wait for the thread that writes the rows."""
    with redirect_stdout(StringIO()):
        trackio.finish()
