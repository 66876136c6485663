"""`metrics.jsonl`: what a run measured, a row per update."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kedge.logs.json_lines import JsonLines, read_json_lines

__all__ = ["METRICS_FILE", "MetricsLog", "read_metrics"]

METRICS_FILE = "metrics.jsonl"
MEASURED = ("time/", "tokens_per_second", "memory/")
"""How the names of those fields begin that differ between two runs of the same seed."""


class MetricsLog:
    """Rows of `metrics.jsonl`: `update` first, times and memory last, the rest by name; flushed row by row.

    The same figures give the same bytes. What JSON has no word for (NaN, ±∞) is null. Rows are added to a file that
    exists, never written over.

    Args:
        folder: The run's folder.
        also: Who else is told, such as `Loggers.write`, once the file has the row.
    """

    def __init__(self, folder: Path, also: Callable[[int, Mapping[str, Any]], None] | None = None) -> None:
        self._lines, self._also = JsonLines(folder / METRICS_FILE), also

    def write(self, update: int, metrics: Mapping[str, Any]) -> None:
        """Add the row of one update.

        Args:
            update: Its number, from 1.
            metrics: Figures by name: numbers, one-element tensors or arrays, text, None.
        """
        names = sorted(metrics, key=lambda name: (name.startswith(MEASURED), name))
        self._lines.write({"update": update, **{name: metrics[name] for name in names}})
        if self._also is not None:
            self._also(update, metrics)

    def sync(self) -> None:
        """Have the disk take all rows now, before a checkpoint that counts on them."""
        self._lines.sync()

    def close(self) -> None:
        """Close the file."""
        self._lines.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's `metrics.jsonl`, also while it is running; `DataError` as `read_json_lines`."""
    return read_json_lines(folder / METRICS_FILE)
