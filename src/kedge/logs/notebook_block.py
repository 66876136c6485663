"""Progress in a notebook: one block of output that is replaced in place."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from html import escape
from typing import Any

__all__ = ["NotebookBlock", "in_notebook"]

INTERVAL = 0.3
"""Seconds between two replacements: more would fill the connection to the browser."""


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook. IPython is not imported if it is not in use."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


class NotebookBlock:
    """A bar and a line of figures in one output block.

    A bar drawn with carriage returns would be kept in the notebook's file frame by frame, and rich needs ipywidgets.

    Args:
        total: Number of steps.
        clock: A monotonic clock, in seconds.
        display: IPython's `display`; None imports it.
    """

    def __init__(self, total: int, clock: Callable[[], float], display: Callable[..., Any] | None = None) -> None:
        self._total, self._clock, self._written = total, clock, -math.inf
        self._display, self._handle = display or _ipython_display(), None

    def start(self, stage: str, done: int) -> None:
        """Create the block."""
        self._handle = self._display(self._bundle(f"{stage} {done}/{self._total}", done), raw=True, display_id=True)

    def show(self, step: int, position: str, values: str, eta: str, *, last: bool) -> None:
        """Replace the block's content, unless it was replaced just now."""
        if last or self._clock() - self._written >= INTERVAL:
            self._written = self._clock()
            self._replace("  ".join(part for part in (position, values, f"eta {eta}") if part), step)

    def say(self, line: str) -> None:
        """Print a permanent line."""
        print(line)

    def stop(self, line: str) -> None:
        """Leave a single line."""
        self._replace(line, None)

    def _replace(self, line: str, step: int | None) -> None:
        if self._handle is not None:
            self._handle.update(self._bundle(line, step), raw=True)

    def _bundle(self, line: str, step: int | None) -> dict[str, str]:
        bar = "" if step is None else f'<progress value="{step}" max="{self._total}"></progress> '
        return {
            "text/plain": line,
            "text/html": f'<div style="font-variant-numeric:tabular-nums">{bar}{escape(line)}</div>',
        }


def _ipython_display() -> Callable[..., Any]:
    from IPython.display import display  # pyright: ignore[reportMissingImports]

    return display
