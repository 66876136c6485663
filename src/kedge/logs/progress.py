"""Progress of a running stage: a live bar on a terminal, one block in a notebook, a few plain lines elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as RichProgress

from kedge.logs.notebook_block import NotebookBlock, in_notebook
from kedge.system.invocation import is_first_rank
from kedge.system.texts import printable

__all__ = ["Progress", "format_duration", "format_figure", "say"]

PLAIN_INTERVAL, LONGEST_INTERVAL = 1.0, 300.0
"""Least and most seconds between two plain lines, so that a log file is neither filled nor silent."""

PLAIN_PARTS = 20
"""Parts of a stage after each of which there is a plain line."""


class Progress:
    """The progress of one stage, used as a context.

        with Progress("ppo", total=60) as progress:
            progress.update(step, {"score": 0.1, "kl": 2.3})

    Args:
        stage: Name of the stage.
        total: Number of steps.
        done: Steps taken before this process, in a resumed run.
        stream: Output stream; standard error by default.
        clock: A monotonic clock, in seconds.
    """

    def __init__(
        self,
        stage: str,
        *,
        total: int,
        done: int = 0,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stage, self._total, self._done, self._clock = printable(stage), total, done, clock
        self._first, self._started = done, clock()
        self._view = _view(stream, total, clock)

    def __enter__(self) -> Progress:
        self._started = self._clock()
        self._view.start(self._stage, self._done)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        elapsed = format_duration(self._clock() - self._started)
        # Ctrl-C and a signal raise what is not an Exception.
        ending = "done" if kind is None else "failed" if issubclass(kind, Exception) else "interrupted"
        self._view.stop(f"{self._stage}: {ending} after {self._done} of {self._total} in {elapsed}")

    def update(self, step: int, values: Mapping[str, float | None] | None = None) -> None:
        """Show that `step` steps are done, with the newest values."""
        self._done = step
        shown = "  ".join(f"{name} {format_figure(value)}" for name, value in (values or {}).items())
        self._view.show(step, f"{self._stage} {step}/{self._total}", shown, self.eta(), last=step >= self._total)

    def say(self, line: str) -> None:
        """Print a permanent line above the live bar."""
        self._view.say(line)

    def eta(self) -> str:
        """Estimated time left at the mean speed so far, such as `1:05`; `?` before the first step."""
        taken = self._done - self._first
        if taken <= 0:
            return "?"
        return format_duration((self._clock() - self._started) / taken * max(0, self._total - self._done))


def say(line: str) -> None:
    """Print a line to standard error, where progress is shown, before or after the progress bar; on the first rank.

    In a notebook, whose standard error looks like a failure, to standard output.
    """
    if not is_first_rank():
        return
    stream = sys.stdout if in_notebook() else sys.stderr
    shown = "\n".join(map(printable, line.split("\n")))  # names of folders can contain a terminal's commands
    Console(file=stream, highlight=False, soft_wrap=True, force_jupyter=False).print(shown, markup=False)


def format_duration(seconds: float) -> str:
    """`0:07`, `12:05`, `3:00:12`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_figure(value: float | None) -> str:
    """A number with three significant digits; `–` for None."""
    if value is None or not math.isfinite(value):
        return "–" if value is None else str(value)
    if isinstance(value, int) or value == 0:
        return f"{value:.0f}"
    if 0.001 <= abs(value) < 1_000:
        return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"
    return f"{value:,.0f}" if 1_000 <= abs(value) < 1_000_000 else f"{value:.2e}"


class _View(Protocol):
    def start(self, stage: str, done: int) -> None: ...
    def show(self, step: int, position: str, values: str, eta: str, *, last: bool) -> None: ...
    def say(self, line: str) -> None: ...
    def stop(self, line: str) -> None: ...


def _view(stream: TextIO | None, total: int, clock: Callable[[], float]) -> _View:
    if stream is None and not is_first_rank():
        return _Silence()
    if stream is None and in_notebook():
        return NotebookBlock(total, clock)
    console = Console(file=stream or sys.stderr, highlight=False, force_jupyter=False)
    return _Bar(console, total) if console.is_terminal else _PlainLines(console, total, clock)


class _Silence:
    """No lines, on a rank that is not the first."""

    def start(self, stage: str, done: int) -> None:
        pass

    def show(self, step: int, position: str, values: str, eta: str, *, last: bool) -> None:
        pass

    def say(self, line: str) -> None:
        pass

    def stop(self, line: str) -> None:
        pass


class _PlainLines:
    """A line at the first step, after every part of the stage, after a long time without one, and at the last step."""

    def __init__(self, console: Console, total: int, clock: Callable[[], float]) -> None:
        self._console, self._clock = console, clock
        self._part, self._step, self._written = total / PLAIN_PARTS, -math.inf, -math.inf

    def start(self, stage: str, done: int) -> None:
        pass

    def show(self, step: int, position: str, values: str, eta: str, *, last: bool) -> None:
        elapsed = self._clock() - self._written
        is_due = step - self._step >= self._part or elapsed >= LONGEST_INTERVAL
        if last or (is_due and elapsed >= PLAIN_INTERVAL):
            self._step, self._written = step, self._clock()
            self.say("  ".join(part for part in (position, values, f"eta {eta}") if part))

    def say(self, line: str) -> None:
        self._console.out(line)

    def stop(self, line: str) -> None:
        self.say(line)


class _Bar:
    """A live bar with the newest values behind it."""

    def __init__(self, console: Console, total: int) -> None:
        columns = ("{task.description}", "eta {task.fields[eta]}", "{task.fields[values]}")
        stage, eta, values = (TextColumn(text, markup=False) for text in columns)
        self._live = RichProgress(stage, BarColumn(24), MofNCompleteColumn(), eta, values, console=console)
        self._total = total

    def start(self, stage: str, done: int) -> None:
        self._task = self._live.add_task(stage, total=self._total, completed=done, eta="?", values="")
        self._live.start()

    def show(self, step: int, position: str, values: str, eta: str, *, last: bool) -> None:
        self._live.update(self._task, completed=step, eta=eta, values=values)

    def say(self, line: str) -> None:
        self._live.console.out(line)

    def stop(self, line: str) -> None:
        self._live.stop()
        self._live.console.out(line)
