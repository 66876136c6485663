"""Prints tables of results on the terminal, without truncating them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kedge_base.errors import ShapeError
from kedge_base.intervals import Interval
from kedge_base.machine.progress import format_figure
from kedge_base.texts import printable

Cell = Interval | float | str | None

PLAIN_WIDTH = 80
"""Characters per line if the stream is not a terminal, as in pipes, log files and notebooks."""

WIDEST = 10_000
"""Characters per line that no table has."""


def print_table(
    title: str, columns: Sequence[str], rows: Mapping[str, Sequence[Cell]], *, stream: TextIO | None = None
) -> None:
    """Print named rows of values: intervals as `0.71 (0.66–0.76)`, numbers with three digits, `–` for None.

    A column without any value is left out. A table that is wider than the terminal is printed as one list per row.
    Cells are never truncated.

    Args:
        title: Title above the table.
        columns: Headings; the first is that of the row names.
        rows: Cells by row name.
        stream: Output stream; standard output by default.

    Raises:
        ShapeError: The number of cells in a row does not match the headings.
    """
    for name, cells in rows.items():
        if len(cells) != len(columns) - 1:
            raise ShapeError(f"row {name!r} has {len(cells)} cells for {len(columns) - 1} columns")
    kept = [at for at in range(len(columns) - 1) if any(cells[at] is not None for cells in rows.values())]
    heads = [printable(columns[at]) for at in (0, *(at + 1 for at in kept))]
    texts = {printable(name): [printable(cell_text(cells[at])) for at in kept] for name, cells in rows.items()}
    # In a notebook, rich would show each print as a separate block; plain text joins the cell's other output.
    console = Console(file=stream, highlight=False, markup=False, force_jupyter=False)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    console.print(Text(f"{printable(title)}\n", style="bold"), soft_wrap=True)
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for at, head in enumerate(heads):
        table.add_column(head, justify="right" if at else "left", no_wrap=True)
    for name, cells in texts.items():
        table.add_row(name, *cells)
    if console.measure(table, options=console.options.update(width=WIDEST)).maximum <= console.width:
        console.print(table)
    else:
        _print_lists(console, heads, texts)
    console.print()


def _print_lists(console: Console, heads: Sequence[str], rows: Mapping[str, Sequence[str]]) -> None:
    label = max(map(len, heads[1:]), default=0)
    for name, cells in rows.items():
        console.print(name, soft_wrap=True)
        for head, cell in zip(heads[1:], cells, strict=True):
            console.print(f"  {head:<{label}}  {cell}", soft_wrap=True)


def cell_text(cell: Cell) -> str:
    """Return a cell as text."""
    return str(cell) if isinstance(cell, (str, Interval)) else format_figure(cell)
