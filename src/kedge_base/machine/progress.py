"""Shows the progress of a running stage: a live bar on a terminal, one block in a notebook, a few plain lines
elsewhere.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from html import escape
from time import monotonic
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as RichProgress

from kedge_base.machine.invocation import is_first_rank
from kedge_base.texts import printable

PLAIN_INTERVAL = 1.0
LONGEST_INTERVAL = 300.0
"""Minimum and maximum seconds between two plain lines, so that a log file is neither flooded nor silent."""

NOTEBOOK_INTERVAL = 0.3
"""Seconds between two updates of a notebook's block: more would flood the connection to the browser."""

PLAIN_PARTS = 20
"""Number of equal parts of a stage; a plain line is printed after each."""


class Progress:
    """The progress of one stage, used as a context.

        with Progress("ppo", total=60) as progress:
            progress.update(step, {"score": 0.1, "kl": 2.3})

    Args:
        stage: Name of the stage.
        total: Number of steps.
        done: Steps taken before this process, in a resumed run.
    """

    def __init__(self, stage: str, *, total: int, done: int = 0) -> None:
        self._stage = printable(stage)
        self._total = total
        self._done = done
        self._first: tuple[int, float] | None = None
        self._started = monotonic()
        self._view = _view(total)

    def __enter__(self) -> Progress:
        self._started = monotonic()
        self._view.start(self._stage, self._done)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        elapsed = format_duration(monotonic() - self._started)
        # A signal raises SystemExit. Any other BaseException is a deliberate end of the stage.
        is_stopped = isinstance(error, KeyboardInterrupt | SystemExit)
        ending = "failed" if isinstance(error, Exception) else "interrupted" if is_stopped else "done"
        self._view.stop(f"{self._stage}: {ending} after {self._done} of {self._total} in {elapsed}")

    def update(self, step: int, values: Mapping[str, float | None] | None = None) -> None:
        """Show that `step` steps are done, with the newest values."""
        self._done = step
        self._first = self._first or (step, monotonic())
        shown = "  ".join(f"{name} {format_figure(value)}" for name, value in (values or {}).items())
        self._view.show(step, f"{self._stage} {step}/{self._total}", shown, self.eta(), last=step >= self._total)

    def say(self, line: str) -> None:
        """Print a permanent line above the live bar."""
        self._view.say(line)

    def eta(self) -> str:
        """Estimated time left, such as `1:05`; `?` before the second step, as the first one is slow."""
        first, started = self._first or (self._done, 0.0)
        if first == self._done:
            return "?"
        return format_duration((monotonic() - started) / (self._done - first) * max(0, self._total - self._done))


def say(line: str) -> None:
    """Print a line on the first rank, to standard error like the progress. Not for use while a progress bar is shown.

    In a notebook, where standard error looks like a failure, it goes to standard output.
    """
    if not is_first_rank():
        return
    stream = sys.stdout if in_notebook() else sys.stderr
    shown = "\n".join(map(printable, line.split("\n")))  # folder names can contain terminal escape sequences
    Console(file=stream, highlight=False, soft_wrap=True, force_jupyter=False).print(shown, markup=False)


def format_duration(seconds: float) -> str:
    """`0:07`, `12:05`, `3:00:12`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_figure(value: float | None) -> str:
    """A number with three significant digits; `–` for None."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return str(value)
    if isinstance(value, int) or value == 0:
        return f"{value:.0f}"
    if 0.001 <= abs(value) < 1_000:
        return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"
    return f"{value:,.0f}" if 1_000 <= abs(value) < 1_000_000 else f"{value:.2e}"


def in_notebook() -> bool:
    """True if this process is the kernel of a notebook. IPython is not imported if it is not in use."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def _view(total: int) -> _View:
    if not is_first_rank():
        return _View()
    if in_notebook():
        return _NotebookBlock(total)
    console = Console(file=sys.stderr, highlight=False, force_jupyter=False)
    return _Bar(console, total) if console.is_terminal else _PlainLines(console, total)


class _View:
    """Shows nothing, for ranks other than the first."""

    def start(self, stage: str, done: int) -> None:
        """Show that the stage starts."""

    def show(self, step: int, position: str, values: str, eta: str, *, last: bool) -> None:
        """Show the newest step."""

    def say(self, line: str) -> None:
        """Print a permanent line."""

    def stop(self, line: str) -> None:
        """Print the last line."""
        self.say(line)


class _PlainLines(_View):
    """Prints a line at the first step, after every part of the stage, after a long time without a line, and at the last
    step.
    """

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._part = total / PLAIN_PARTS
        self._step = self._written = -math.inf

    def show(self, step: int, position: str, values: str, eta: str, *, last: bool) -> None:
        elapsed = monotonic() - self._written
        is_due = step - self._step >= self._part or elapsed >= LONGEST_INTERVAL
        if last or (is_due and elapsed >= PLAIN_INTERVAL):
            self._step, self._written = step, monotonic()
            self.say(_line(position, values, eta))

    def say(self, line: str) -> None:
        self._console.out(line)


class _Bar(_View):
    """A live bar, followed by the newest values."""

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


class _NotebookBlock(_View):
    """A bar and a line of figures in one output block.

    A bar drawn with carriage returns would be kept in the notebook's file frame by frame, and rich needs ipywidgets.

    Args:
        total: Number of steps.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._written = -math.inf

    def start(self, stage: str, done: int) -> None:
        from IPython.display import display  # pyright: ignore[reportMissingImports]

        self._handle: Any = display(self._bundle(f"{stage} {done}/{self._total}", done), raw=True, display_id=True)

    def show(self, step: int, position: str, values: str, eta: str, *, last: bool) -> None:
        if last or monotonic() - self._written >= NOTEBOOK_INTERVAL:
            self._written = monotonic()
            self._replace(_line(position, values, eta), step)

    def say(self, line: str) -> None:
        print(line)

    def stop(self, line: str) -> None:
        self._replace(line, None)

    def _replace(self, line: str, step: int | None) -> None:
        self._handle.update(self._bundle(line, step), raw=True)

    def _bundle(self, line: str, step: int | None) -> dict[str, str]:
        bar = "" if step is None else f'<progress value="{step}" max="{self._total}"></progress> '
        return {
            "text/plain": line,
            "text/html": f'<div style="font-variant-numeric:tabular-nums">{bar}{escape(line)}</div>',
        }


def _line(position: str, values: str, eta: str) -> str:
    return "  ".join(filter(None, (position, values, f"eta {eta}")))
