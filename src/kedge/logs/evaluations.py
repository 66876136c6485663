"""`evaluations.jsonl` and `critic_checks.jsonl`: every evaluation on held-out prompts, the start included."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kedge.logs.json_lines import JsonLines, read_json_lines

__all__ = ["CRITIC_CHECKS_FILE", "EVALUATIONS_FILE", "EvaluationsLog", "read_evaluations"]

EVALUATIONS_FILE = "evaluations.jsonl"
CRITIC_CHECKS_FILE = "critic_checks.jsonl"


class EvaluationsLog:
    """Writes a file of evaluations, which is created with its first row and flushed after each.

    Args:
        folder: The run's folder.
        name: The file's name.
    """

    def __init__(self, folder: Path, name: str = EVALUATIONS_FILE) -> None:
        self._path = folder / name
        self._lines: JsonLines | None = None

    def write(self, update: int, results: Mapping[str, Any]) -> None:
        """Append an evaluation: updates that the policy has completed, from 0, and its results."""
        self._lines = self._lines or JsonLines(self._path)
        self._lines.write({"update": update, **dict(sorted(results.items()))})

    def sync(self) -> None:
        """Flush all rows to disk, before a checkpoint that relies on them."""
        if self._lines is not None:
            self._lines.sync()

    def __enter__(self) -> EvaluationsLog:
        return self

    def __exit__(self, *_: object) -> None:
        if self._lines is not None:
            self._lines.close()


def read_evaluations(folder: Path, name: str = EVALUATIONS_FILE) -> list[dict[str, Any]]:
    """The rows of a run's evaluations, or of its checks of the critic; empty for a run without any.

    Raises:
        DataError: The file is damaged.
    """
    path = folder / name
    return read_json_lines(path) if path.is_file() else []
