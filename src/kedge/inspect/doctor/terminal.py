"""Prints findings on a terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kedge.inspect.doctor.examination import Examination
from kedge.inspect.doctor.finding import Finding, Severity, severity_rank
from kedge.system.texts import printable

__all__ = ["STYLES", "one_line", "print_examinations"]

STYLES: dict[Severity, str] = {"serious": "bold red", "warning": "bold yellow", "note": "bold cyan"}


def one_line(finding: Finding) -> str:
    """Severity, rule and figures, for a run's log."""
    return printable(f"{finding.severity}: {finding.rule}: {finding.seen}")


def print_examinations(examined: Mapping[str, Examination], console: Console) -> None:
    """Print the verdict on each run, and each finding with its figures, meaning, remedies and documentation link.

    Args:
        examined: The runs that were examined, by name.
        console: Where to print.
    """
    for name, examination in examined.items():
        console.print(Text(printable(f"{'✓ ' if examination.is_clean else ''}{name}: {examination.verdict}")))
        if examination.ended_early:
            console.print(Text(printable(f"ended early: {examination.ended_early}")))
    for finding in sorted((each for one in examined.values() for each in one.findings), key=severity_rank):
        console.print()
        console.print(Text.assemble((finding.severity, STYLES[finding.severity]), "  ", (finding.rule, "bold")))
        console.print(Padding(_table(finding), (0, 0, 0, 2)))


def _table(finding: Finding) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for label, text in (
        ("seen", finding.seen),
        ("means", finding.means),
        ("try", finding.try_),
        ("docs", finding.docs),
    ):
        if text:
            table.add_row(label, Text(printable(text)))
    return table
