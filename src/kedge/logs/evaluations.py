"""`evaluations.jsonl`: the metrics of every evaluation on held-out prompts, the start included."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kedge.logs.json_lines import JsonLines, read_json_lines

__all__ = ["EVALUATIONS_FILE", "EvaluationsLog", "read_evaluations"]

EVALUATIONS_FILE = "evaluations.jsonl"


class EvaluationsLog:
    """Writes `evaluations.jsonl`, which is created with its first row and flushed after each.

    Args:
        folder: The run's folder.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / EVALUATIONS_FILE
        self._lines: JsonLines | None = None

    def write(self, update: int, metrics: Mapping[str, float]) -> None:
        """Append an evaluation: updates that the policy has completed, from 0, and the metrics."""
        self._lines = self._lines or JsonLines(self._path)
        self._lines.write({"update": update, **dict(sorted(metrics.items()))})

    def sync(self) -> None:
        """Flush all rows to disk, before a checkpoint that relies on them."""
        if self._lines is not None:
            self._lines.sync()

    def __enter__(self) -> EvaluationsLog:
        return self

    def __exit__(self, *_: object) -> None:
        if self._lines is not None:
            self._lines.close()


def read_evaluations(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's evaluations; empty for a run without any.

    Raises:
        DataError: The file is damaged.
    """
    path = folder / EVALUATIONS_FILE
    return read_json_lines(path) if path.is_file() else []
