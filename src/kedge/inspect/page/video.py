"""The picture of an episode of a control run."""

from __future__ import annotations

import base64

from kedge.inspect.record import RunRecord
from kedge.system.output import VIDEO_FILE

__all__ = ["video"]

MOST_BYTES = 6_000_000
"""Larger animations stay beside the page."""


def video(record: RunRecord) -> str | None:
    """The run's animation as a data URI; None if there is none, or it is too large for a page."""
    path = record.folder / VIDEO_FILE
    try:
        if not path.is_file() or path.stat().st_size > MOST_BYTES:
            return None
        content = path.read_bytes()
    except OSError:
        return None
    return f"data:image/webp;base64,{base64.b64encode(content).decode('ascii')}"
