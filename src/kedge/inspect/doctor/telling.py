"""Findings on a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kedge.inspect.doctor.finding import Finding, Severity
from kedge.texts import printable

__all__ = ["one_line", "print_findings"]

STYLES: dict[Severity, str] = {"serious": "bold red", "warning": "bold yellow", "note": "bold cyan"}


def one_line(finding: Finding) -> str:
    """What was seen, for the log of a run."""
    return printable(f"{finding.severity}: {finding.rule}: {finding.seen}")


def print_findings(name: str, findings: Sequence[Finding], console: Console) -> None:
    """Print findings as they come, each with what was seen, what it means, what to try and where to read on.

    Args:
        name: What was examined.
        findings: What was found, gravest first.
        console: Where to.
    """
    counts = Counter(finding.severity for finding in findings)
    told = [f"{count} {severity if count == 1 or severity == 'serious' else severity + 's'}"
            for severity, count in counts.items()]  # fmt: skip
    console.print(Text(printable(f"{name}: {', '.join(told) or 'nothing that calls for an answer'}")))
    for finding in findings:
        console.print()
        console.print(Text.assemble((finding.severity, STYLES[finding.severity]), "  ", (finding.rule, "bold")))
        console.print(Padding(_page(finding), (0, 0, 0, 2)))


def _page(finding: Finding) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    told = {"seen": finding.seen, "means": finding.means, "try": finding.try_, "read": finding.docs}
    for label, text in told.items():
        if text:
            table.add_row(label, Text(printable(text)))
    return table
