"""SIGTERM and Ctrl-C: the one place that decides how a run ends early."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["GRACE_SECONDS", "Stopping", "Terminated", "stopping"]

GRACE_SECONDS = 20.0
"""How long an update that was begun may go on after a signal; then it is dropped."""


class Terminated(SystemExit):
    """SIGTERM ends the run; as an exit of the interpreter it is code 143."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


class Stopping:
    """Whether the run has been asked to stop, and by which signal."""

    def __init__(self) -> None:
        self._signal: int | None = None

    @property
    def requested(self) -> bool:
        """Whether a signal has come: the work in hand is to be ended and saved."""
        return self._signal is not None

    def request(self, signum: int) -> None:
        """The first signal is a request, the second ends the process at once."""
        if self._signal is not None:
            _exit_at_once(signum)
        self._signal = signum

    def raise_if_requested(self) -> None:
        """End the run here.

        Raises:
            KeyboardInterrupt: Ctrl-C came.
            Terminated: SIGTERM came.
        """
        if self._signal == signal.SIGTERM:
            raise Terminated
        if self._signal is not None:
            raise KeyboardInterrupt


@contextmanager
def stopping(grace_seconds: float = GRACE_SECONDS) -> Iterator[Stopping]:
    """Inside, SIGTERM and Ctrl-C are requests: the block looks for them where it can stop cleanly.

    A block that has not looked when the grace is over is interrupted wherever it is: the exception of
    `raise_if_requested` is raised in its midst. Off the main thread Python delivers no signals, and nothing is changed.

    Args:
        grace_seconds: Seconds from the signal to the interruption.
    """
    asked = Stopping()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def on_signal(signum: int, _frame: FrameType | None) -> None:
        asked.request(signum)
        _set_timer(grace_seconds)

    def on_timer(_signum: int, _frame: FrameType | None) -> None:
        asked.raise_if_requested()

    handlers = {signal.SIGINT: on_signal, signal.SIGTERM: on_signal, **({_TIMER: on_timer} if _TIMER else {})}
    before = {signum: signal.signal(signum, handler) for signum, handler in handlers.items()}
    try:
        yield asked
    finally:
        _set_timer(0.0)
        for signum, handler in before.items():
            signal.signal(signum, handler)


# Windows has no such timer: there an update is never cut short.
_TIMER = None if sys.platform == "win32" else signal.SIGALRM


def _set_timer(seconds: float) -> None:
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_REAL, seconds)


def _exit_at_once(signum: int) -> None:
    """Leave without any clean-up that could take time: whatever is being written is written beside, not over."""
    if sys.stderr.isatty():
        os.write(2, b"\x1b[?25h\n")  # the progress display had hidden the cursor
    os._exit(128 + signum)
