"""Prints findings on a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kedge.inspect.doctor.finding import Finding, Severity
from kedge.texts import printable

__all__ = ["STYLES", "one_line", "print_findings"]

STYLES: dict[Severity, str] = {"serious": "bold red", "warning": "bold yellow", "note": "bold cyan"}


def one_line(finding: Finding) -> str:
    """Severity, rule and figures, for a run's log."""
    return printable(f"{finding.severity}: {finding.rule}: {finding.seen}")


def print_findings(name: str, findings: Sequence[Finding], console: Console) -> None:
    """Print each finding with its figures, meaning, remedies and documentation link.

    Args:
        name: What was examined.
        findings: Most severe first.
        console: Where to print.
    """
    counts = Counter(finding.severity for finding in findings)
    summary = [f"{count} {severity if count == 1 or severity == 'serious' else severity + 's'}"
               for severity, count in counts.items()]  # fmt: skip
    console.print(Text(printable(f"{name}: {', '.join(summary) or 'no problems found'}")))
    for finding in findings:
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
