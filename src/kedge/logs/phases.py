"""Logs the progress of a stage without updates as rows of `progress.jsonl` for watchers."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from kedge.logs.json_lines import RunLog
from kedge_base.run_folder.output import PROGRESS_FILE

OnPhase = Callable[[str, int, int], None]
"""Called with a phase's name, the number of completed responses, and their total."""


class PhaseLog(RunLog):
    """Writes a row per batch: `phase`, `done`, `total`, and `seconds` since the start.

    Args:
        folder: The run's folder.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / PROGRESS_FILE)
        self.open()
        self._started = time.monotonic()
        self._rows = 0

    def write(self, phase: str, done: int, total: int) -> None:
        """Append a row; the rows are numbered from 1 as `update`, as in all logs."""
        self._rows += 1
        seconds = round(time.monotonic() - self._started, 3)
        self.append(self._rows, {"phase": phase, "done": done, "total": total, "seconds": seconds})
