"""Stops a run early on Ctrl-C, SIGTERM, and the signals by which terminals and clusters announce the end."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from kedge.ranks import ALONE, Ranks
from kedge_base.errors import RunEnded
from kedge_base.machine.invocation import is_command_line

GRACE_SECONDS = 20.0
"""Time in which the current update must stop or finish after a signal, before it is cut short."""

RANKS_GRACE_SECONDS = 8.0
"""Grace period with several ranks, which launchers kill after 30 seconds, including the time for saving."""

ANNOUNCEMENTS = () if sys.platform == "win32" else (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals for a lost connection, and those that clusters send before the end, such as Slurm's `--signal=USR1@60`."""


class Terminated(RunEnded):
    """A signal other than Ctrl-C stopped the run; uncaught, it exits the interpreter with 128 + its number."""

    def __init__(self, signum: int = signal.SIGTERM) -> None:
        super().__init__(128 + signum)


class Stopping:
    """Whether a stop was requested, and by which signal; all ranks stop in the same place.

    Args:
        ranks: The ranks that stop together.

    Attributes:
        ranks: The ranks that stop together.
        was_agreed: All ranks stop in the same place.
        was_raised: The block has been stopped, and is saving what it has.
        at_once: A single process stops wherever it is, since the block has changed nothing yet.
    """

    def __init__(self, ranks: Ranks = ALONE) -> None:
        self.ranks = ranks
        self._signal: int | None = None
        self._is_saving = False
        self.was_agreed = False
        self.was_raised = False
        self.at_once = False

    @property
    def requested(self) -> bool:
        """True if a signal has arrived: finish the current step and save."""
        return self._signal is not None

    def request(self, signum: int) -> None:
        """Record the first signal as a request, and stop here if the block allows it.

        A second signal ends a command immediately. In a Python program that continues, such as a notebook, the block
        stops here, unless it is saving. With several ranks a second signal has no effect: each rank gets both the
        terminal's and the launcher's.

        Raises:
            KeyboardInterrupt, Terminated: See `raise_if_requested`.
        """
        is_second = self.requested
        self._signal = self._signal or signum
        if self.ranks.are_several:
            return
        if is_second and is_command_line():
            _exit_at_once(signum)
        if (is_second or self.at_once) and not self._is_saving:
            self._raise_for(self._signal)

    def raise_if_requested(self) -> None:
        """Stop the run here if it was requested of any rank; all ranks call this in the same places.

        Raises:
            KeyboardInterrupt: The signal was Ctrl-C.
            Terminated: It was a different signal.
        """
        signum = self.ranks.largest(self._signal or 0)
        self.was_agreed = bool(signum)
        self._raise_for(signum)

    def forget(self) -> None:
        """Clear the request once it has been handled."""
        self._signal = None
        self.was_raised = self.at_once = False

    def grace_is_over(self, grace_seconds: float) -> None:
        """Stop this rank here; while it is saving, extend the grace period instead. Raises as `raise_if_requested`."""
        if self._is_saving:
            _set_timer(grace_seconds)
        else:
            self._raise_for(self._signal or 0)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Within this context, the end of the grace period does not interrupt."""
        self._is_saving = True
        try:
            yield
        finally:
            self._is_saving = False

    def _raise_for(self, signum: int) -> None:
        if not signum:
            return
        self.was_raised = True
        _set_timer(0.0)  # what follows is saving
        raise KeyboardInterrupt if signum == signal.SIGINT else Terminated(signum)


@contextmanager
def stopping(grace_seconds: float | None = None, ranks: Ranks = ALONE, *, at_once: bool = False) -> Iterator[Stopping]:
    """Within this context, signals are requests; the block checks for them where it can stop.

    These are Ctrl-C, SIGTERM and, unless the program handles or ignores them, `ANNOUNCEMENTS`.

    A block that has not checked within the grace period is interrupted wherever it is, with the exception of
    `raise_if_requested`; once, and not while it is saving. Outside the main thread Python delivers no signals, and this
    context does nothing.

    Args:
        grace_seconds: Seconds from the signal to the interruption; None for the usual time.
        ranks: The ranks that stop together.
        at_once: Stop a single process wherever it is, since the block has changed nothing yet.
    """
    stop = Stopping(ranks)
    stop.at_once = at_once
    with listening(stop, grace_seconds):
        yield stop


@contextmanager
def listening(stop: Stopping, grace_seconds: float | None = None) -> Iterator[None]:
    """Within this context, signals are requests; see `stopping`."""
    ranks = stop.ranks
    grace = grace_seconds or (RANKS_GRACE_SECONDS if ranks.are_several else GRACE_SECONDS)
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_signal(signum: int, _frame: FrameType | None) -> None:
        stop.request(signum)
        if not stop.was_raised:
            _set_timer(grace)

    def on_timer(_signum: int, _frame: FrameType | None) -> None:
        stop.grace_is_over(grace)

    free = [signum for signum in ANNOUNCEMENTS if signal.getsignal(signum) == signal.SIG_DFL]  # not under nohup
    requests = dict.fromkeys([signal.SIGINT, signal.SIGTERM, *free], on_signal)
    handlers = {**requests, **({_TIMER: on_timer} if _TIMER else {})}
    before = {signum: signal.signal(signum, handler) for signum, handler in handlers.items()}
    try:
        yield
    finally:
        _set_timer(0.0)
        # A failing rank still has to save the run; its launcher's signal would cut that short.
        is_failing = ranks.are_several and sys.exc_info()[0] is not None
        for signum, handler in before.items():
            signal.signal(signum, signal.SIG_IGN if is_failing and signum == signal.SIGTERM else handler)


# Windows has no such timer: updates are never interrupted there.
_TIMER = None if sys.platform == "win32" else signal.SIGALRM


def _set_timer(seconds: float) -> None:
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_REAL, seconds)


def _exit_at_once(signum: int) -> None:
    """Exit without cleanup, which could take time; files are written under temporary names, so none is damaged."""
    with suppress(OSError):  # the terminal is gone
        if os.isatty(2):
            os.write(2, b"\x1b[?25h\n")  # show the cursor, which the progress display hides
    os._exit(128 + signum)
