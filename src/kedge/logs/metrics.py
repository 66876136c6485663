"""`metrics.jsonl`: a run's metrics, one row per update."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kedge.logs.json_lines import RunLog, read_json_lines

__all__ = ["METRICS_FILE", "MetricsLog", "read_metrics"]

METRICS_FILE = "metrics.jsonl"
MEASURED = ("time/", "tokens_per_second", "memory/")
"""Prefixes of the metrics that differ between two runs with the same seed."""


class MetricsLog(RunLog):
    """Writes `metrics.jsonl`: `update` first, times and memory last, the rest by name; flushed after each row.

    Equal metrics give equal bytes. NaN and ±∞ become null. An existing file is appended to.

    Args:
        folder: The run's folder.
        also: Called with each row once it is in the file, such as `LoggerGroup.write`.
    """

    def __init__(self, folder: Path, also: Callable[[int, Mapping[str, Any]], None] | None = None) -> None:
        super().__init__(folder / METRICS_FILE)
        self._also = also

    def write(self, update: int, metrics: Mapping[str, Any]) -> None:
        """Append the row of one update.

        Args:
            update: Number of the update, from 1.
            metrics: Values by name: numbers, one-element tensors or arrays, text, None.
        """
        names = sorted(metrics, key=lambda name: (name.startswith(MEASURED), name))
        self.append(update, {name: metrics[name] for name in names})
        if self._also is not None:
            self._also(update, metrics)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's `metrics.jsonl`, also of a running run.

    Raises:
        DataError: As `read_json_lines`.
    """
    return read_json_lines(folder / METRICS_FILE)
