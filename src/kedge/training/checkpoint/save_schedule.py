"""When a run saves itself: every so many updates, every so many minutes, whichever comes first."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["SaveSchedule"]


class SaveSchedule:
    """Says after each update whether a checkpoint is due. When one is saved changes no result.

    Args:
        every: Updates from one checkpoint to the next, ≥ 1; None where the updates don't matter.
        every_minutes: Minutes from one to the next, > 0; None where the time does not matter.
        clock: Seconds from some moment on.
    """

    def __init__(
        self, *, every: int | None, every_minutes: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._every, self._every_minutes, self._clock = every, every_minutes, clock
        self._saved_at = clock()

    def is_due(self, update: int) -> bool:
        """Whether the run is to be saved now that it has finished this update, counted from 1."""
        by_count = self._every is not None and update % self._every == 0
        minutes = (self._clock() - self._saved_at) / 60
        return by_count or (self._every_minutes is not None and minutes >= self._every_minutes)

    def saved(self) -> None:
        """A checkpoint has been saved: the minutes count from here."""
        self._saved_at = self._clock()
