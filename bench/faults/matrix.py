"""Who was found by what, as Markdown: a row per fault, and one per healthy run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from bench.faults.running import Found, Outcome
from bench.processes import BenchError

__all__ = ["put_between", "write_matrix"]

BEGIN, END = "<!-- faults: begin -->", "<!-- faults: end -->"
NONE = "–"


def write_matrix(outcomes: Sequence[Outcome]) -> str:
    """Both tables and what they come to; several seeds of a case stand in one row each."""
    faults = [outcome for outcome in outcomes if outcome.rule]
    healthy = [outcome for outcome in outcomes if not outcome.rule]
    seeds = sorted({outcome.seed for outcome in outcomes})
    named, silent = (sum(outcome.good for outcome in group) for group in (faults, healthy))
    parts = [
        f"Seeds {', '.join(map(str, seeds))}: {named} of {len(faults)} faulty runs are found by name, first or second; "
        f"{silent} of {len(healthy)} healthy runs have no serious finding. "
        f"A run takes {sum(outcome.seconds for outcome in outcomes) / len(outcomes):.0f} s on one core.",
        _table(["fault put in", "seed", "", "first", "second", "others"], map(_fault_row, faults)),
        _table(["healthy run", "seed", "", "serious", "warnings", "notes"], map(_healthy_row, healthy)),
    ]
    return "\n\n".join(parts)


def put_between(path: Path, text: str) -> None:
    """Put a text between the two markers of a file, in place of what stands there.

    Raises:
        BenchError: The file lacks the markers.
    """
    page = path.read_text(encoding="utf-8")
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise BenchError(f"{path} has no {BEGIN} and {END} for the matrix to stand between")
    path.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}", encoding="utf-8")


def _fault_row(outcome: Outcome) -> list[str]:
    names = [_name(found, outcome.rule) for found in outcome.findings]
    first, second = [*names, NONE, NONE][:2]
    others = ", ".join(names[2:]) or NONE
    mark = "✓" if outcome.good else f"✗ {outcome.rule}"
    return [outcome.case, str(outcome.seed), mark, first, second, others]


def _healthy_row(outcome: Outcome) -> list[str]:
    by_severity = {
        severity: [each.rule for each in outcome.findings if each.severity == severity]
        for severity in ("serious", "warning", "note")
    }
    return [
        outcome.case,
        str(outcome.seed),
        "✓" if outcome.good else "✗",
        *(", ".join(names) or NONE for names in by_severity.values()),
    ]


def _name(found: Found, rule: str) -> str:
    return f"**{found.rule}**" if found.rule == rule else found.rule


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
