"""`details.jsonl`: what an update looked like where one number does not tell it, a row per update."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kedge.report.json_lines import JsonLines

__all__ = ["DETAILS_FILE", "DetailsLog"]

DETAILS_FILE = "details.jsonl"


class DetailsLog:
    """Rows of `details.jsonl`, its update in front; flushed row by row.

    Args:
        folder: The run's folder.
    """

    def __init__(self, folder: Path) -> None:
        self._lines = JsonLines(folder / DETAILS_FILE)

    def write(self, update: int, details: Mapping[str, Any]) -> None:
        """Add the row of one update."""
        self._lines.write({"update": update, **details})

    def sync(self) -> None:
        """Have the disk take all rows now, before a checkpoint that counts on them."""
        self._lines.sync()

    def close(self) -> None:
        """Close the file."""
        self._lines.close()

    def __enter__(self) -> DetailsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
