"""When checkpoints are saved: every N updates or every M minutes, whichever comes first."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["SaveSchedule"]


class SaveSchedule:
    """Decides after each update whether a checkpoint is due; this affects no result.

    Args:
        every: Updates between checkpoints, ≥ 1; None for no such limit.
        every_minutes: Minutes between checkpoints, > 0; None for no such limit.
        clock: A monotonic clock, in seconds.
    """

    def __init__(
        self, *, every: int | None, every_minutes: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._every, self._every_minutes, self._clock = every, every_minutes, clock
        self._saved_at = clock()

    def is_due(self, update: int) -> bool:
        """Whether a checkpoint is due after this update, counted from 1."""
        by_count = self._every is not None and update % self._every == 0
        minutes = (self._clock() - self._saved_at) / 60
        return by_count or (self._every_minutes is not None and minutes >= self._every_minutes)

    def saved(self) -> None:
        """Restart the minutes after a save."""
        self._saved_at = self._clock()
