"""As much of long texts and long lists as a page can hold."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from kedge.inspect.page.numbers import evenly_spaced

__all__ = ["fitting", "shortened"]

MOST_CHARACTERS = 6000


def fitting(rows: Sequence[dict[str, Any]], most_bytes: int) -> list[dict[str, Any]]:
    """All rows, or as many evenly spaced ones as fit.

    Args:
        rows: Rows in JSON types.
        most_bytes: Size limit of their JSON.
    """
    size = sum(len(json.dumps(row)) for row in rows)
    most = len(rows) if size <= most_bytes else max(1, len(rows) * most_bytes // size)
    return [rows[index] for index in evenly_spaced(len(rows), most)]


def shortened(text: str) -> str:
    """The text, or the end of one that is too long for the page."""
    return text if len(text) <= MOST_CHARACTERS else f"…{text[-MOST_CHARACTERS:]}"
