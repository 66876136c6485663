"""`evaluations.jsonl` and `critic_checks.jsonl`: every evaluation on held-out prompts, the start included."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kedge.logs.json_lines import RunLog

__all__ = ["CRITIC_CHECKS_FILE", "EVALUATIONS_FILE", "EvaluationsLog"]

EVALUATIONS_FILE = "evaluations.jsonl"
CRITIC_CHECKS_FILE = "critic_checks.jsonl"


class EvaluationsLog(RunLog):
    """Writes a file of evaluations, which is created with its first row and flushed after each.

    Args:
        folder: The run's folder.
        name: The file's name.
    """

    def __init__(self, folder: Path, name: str = EVALUATIONS_FILE) -> None:
        super().__init__(folder / name, is_lazy=True)

    def write(self, update: int, results: Mapping[str, Any]) -> None:
        """Append an evaluation: updates that the policy has completed, from 0, and its results."""
        self.append(update, dict(sorted(results.items())))
