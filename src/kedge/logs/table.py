"""Tables of results on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kedge.algorithm.statistics import Interval
from kedge.errors import ShapeError
from kedge.logs.progress import format_figure
from kedge.texts import printable

__all__ = ["Cell", "print_table"]

Cell = Interval | float | str | None

PLAIN_WIDTH = 120
"""Characters per line if the stream is not a terminal."""


def print_table(
    title: str, columns: Sequence[str], rows: Mapping[str, Sequence[Cell]], *, stream: TextIO | None = None
) -> None:
    """Print named rows of values: intervals as `0.71 (0.66–0.76)`, numbers with three digits, `–` for None.

    Args:
        title: Title above the table.
        columns: Headings; the first is that of the row names.
        rows: Cells by row name.
        stream: Output stream; standard output by default.

    Raises:
        ShapeError: The number of cells in a row does not match the headings.
    """
    table = Table(title=printable(title), title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    for name, cells in rows.items():
        if len(cells) != len(columns) - 1:
            raise ShapeError(f"row {name!r} has {len(cells)} cells for {len(columns) - 1} columns")
        table.add_row(printable(name), *(_text(cell) for cell in cells))
    console = Console(file=stream, highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(file=stream, highlight=False, markup=False, width=PLAIN_WIDTH)
    console.print(table)


def _text(cell: Cell) -> str:
    return str(cell) if isinstance(cell, (str, Interval)) else format_figure(cell)
