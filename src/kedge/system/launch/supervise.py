"""Watches the ranks of a run: shows their output, ends all when one fails, and starts all again."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import IO

from kedge.system.launch.seats import News, Seats, rank_variables

__all__ = ["Output", "Patience", "supervise"]

USER_ERROR = 2
"""Exit status of a rank with a user error, which a restart would only repeat."""
LOST_CONTACT = 3
"""Exit status of a rank that ended because another one is gone."""


@dataclass(frozen=True)
class Patience:
    """Seconds that ranks are given.

    Attributes:
        alone: After a failure, for the others to notice, save a checkpoint and end by themselves.
        asked: After SIGTERM, before SIGKILL.
        between: Between two looks.
    """

    alone: float = 15.0
    asked: float = 30.0
    between: float = 0.2


class Output:
    """Shows what ranks write: everything of the first one, standard error of the others with the rank in front.

    Args:
        output: Where the first rank's standard output goes; standard output by default.
        errors: Where all else goes; standard error by default.
    """

    def __init__(self, output: IO[bytes] | None = None, errors: IO[bytes] | None = None) -> None:
        self._output = output or sys.stdout.buffer
        self._errors = errors or sys.stderr.buffer
        self._begun: dict[int, bytes] = {}

    def show(self, rank: int, news: News) -> None:
        """Show the news of one rank."""
        if rank == 0:
            self._output.write(news.output)
            self._errors.write(news.errors)
        else:
            *lines, rest = (self._begun.pop(rank, b"") + news.errors).split(b"\n")
            if rest and news.has_ended:
                lines, rest = [*lines, rest], b""
            if rest:
                self._begun[rank] = rest
            for line in lines:
                self._errors.write(b"rank %d: %s\n" % (rank, line))
        self._output.flush()
        self._errors.flush()

    def say(self, line: str) -> None:
        """A line of the launcher's own."""
        self._errors.write(f"{line}\n".encode())
        self._errors.flush()


def supervise(
    open_seats: Callable[[], AbstractContextManager[Seats]],
    command: Sequence[str],
    *,
    folder: str,
    variables: Mapping[str, str],
    max_restarts: int,
    stop: Callable[[], int | None],
    output: Output,
    patience: Patience | None = None,
) -> int:
    """Run a command on all seats; if a rank fails, end all and start them again from the last checkpoint.

    Args:
        open_seats: Provides one process per rank; called for every start.
        command: A stage with its options and --out.
        folder: Working directory.
        variables: Set for all ranks.
        max_restarts: How often they are started again, in all.
        stop: The signal by which the user asks to end, or None.
        output: Shows what they write.
        patience: Waiting times.

    Returns:
        Exit status: 0; 2 for a user error; 128 plus a signal's number; 1 if they failed too often.
    """
    for restart in range(max_restarts + 1):
        with open_seats() as seats:
            own = rank_variables(seats.places, seats.free_port())
            again = ["--resume", "auto"] if restart and not _resumes(command) else []
            seats.start([*command, *again], [{**variables, **each} for each in own], folder)
            failures = _watch(seats, stop, output, patience or Patience())
        if not failures:
            return 0
        if signum := stop():
            return 128 + signum
        if USER_ERROR in (news.status for news in failures.values()):
            return USER_ERROR
        reason = _reason(failures)
        if restart < max_restarts:
            output.say(f"{reason}; all start again from the last checkpoint (restart {restart + 1} of {max_restarts})")
        else:
            output.say(f"error: {reason}; given up after {max_restarts} restarts")
    return 1


def _watch(seats: Seats, stop: Callable[[], int | None], output: Output, patience: Patience) -> dict[int, News]:
    """Wait until all ranks have ended; those that failed, in the order in which they did."""
    failures: dict[int, News] = {}
    deadline, signum, is_asked = float("inf"), signal.SIGTERM, False
    while True:
        all_news = seats.news()
        for rank, news in enumerate(all_news):
            output.show(rank, news)
            if news.has_ended and (news.is_lost or news.status) and rank not in failures:
                failures[rank] = news
                deadline = min(deadline, time.monotonic() + patience.alone)
        if all(news.has_ended for news in all_news):
            return failures
        if stop() and not is_asked:
            deadline = 0.0
        if time.monotonic() >= deadline:
            seats.end(signum)
            is_asked, signum, deadline = True, signal.SIGKILL, time.monotonic() + patience.asked
        time.sleep(patience.between)


def _resumes(command: Sequence[str]) -> bool:
    return any(word == "--resume" or word.startswith("--resume=") for word in command)


def _reason(failures: Mapping[int, News]) -> str:
    """What happened first, other than that ranks noticed that another one is gone."""
    causes = {rank: news for rank, news in failures.items() if news.status != LOST_CONTACT} or failures
    rank, news = next(iter(causes.items()))
    if news.is_lost or news.status is None:
        return f"rank {rank} and the process that started it are gone"
    if news.status < 0:
        return f"rank {rank} was ended by {signal.Signals(-news.status).name}"
    return f"rank {rank} failed with exit code {news.status}"
