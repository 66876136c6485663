"""The progress of a stage without updates, as rows of `progress.jsonl` for watchers."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from kedge.logs.json_lines import JsonLines
from kedge_base.run_folder.output import PROGRESS_FILE

JUDGING = "judge"
"""The phase where a judge reads all responses of a side at once."""

OnPhase = Callable[[str, int, int], None]
"""Called with the name of a phase, the responses done, and their total."""


class PhaseLog:
    """Writes a row per batch: `phase`, `done`, `total`, and `seconds` since the start.

    Args:
        folder: The run's folder.
    """

    def __init__(self, folder: Path) -> None:
        self._lines = JsonLines(folder / PROGRESS_FILE)
        self._started = time.monotonic()
        self._rows = 0

    def write(self, phase: str, done: int, total: int) -> None:
        """Append a row; the rows are numbered from 1 as `update`, as in all logs."""
        self._rows += 1
        seconds = round(time.monotonic() - self._started, 3)
        self._lines.write({"update": self._rows, "phase": phase, "done": done, "total": total, "seconds": seconds})

    def close(self) -> None:
        """Flush all rows to disk and close the file."""
        self._lines.close()
