"""Writes the results as Markdown tables, with one row per case over all seeds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Final, get_args

from bench.faults.running import Outcome
from kedge_inspect.doctor import Severity

NONE: Final = "–"
SEVERITIES: Final[tuple[Severity, ...]] = get_args(Severity)

Group = Sequence[Outcome]
"""The outcomes of one case, by seed."""


def write_matrix(outcomes: Sequence[Outcome]) -> str:
    """A summary and both tables."""
    faults = [outcome for outcome in outcomes if outcome.rule]
    healthy = [outcome for outcome in outcomes if not outcome.rule]
    seeds = ", ".join(map(str, sorted({outcome.seed for outcome in outcomes})))
    named, quiet = (sum(outcome.good for outcome in group) for group in (faults, healthy))
    summary = (
        f"Seeds {seeds}: in {named} of {len(faults)} faulty runs the right rule ranks first or second; {quiet} of "
        f"{len(healthy)} healthy runs have no serious finding. A run takes "
        f"{median(outcome.seconds for outcome in outcomes):.0f} s on one core."
    )
    columns = ["injected fault", "found", "first", "second", "others", "advice followed"]
    return "\n\n".join([
        summary,
        _table(columns, map(_fault_row, _by_case(faults))),
        _table(["healthy run", "no alarm", "serious", "warnings", "notes"], map(_healthy_row, _by_case(healthy))),
    ])  # fmt: skip


def _by_case(outcomes: Sequence[Outcome]) -> list[Group]:
    names = dict.fromkeys(outcome.case for outcome in outcomes)
    return [[outcome for outcome in outcomes if outcome.case == name] for name in names]


def _fault_row(group: Group) -> list[str]:
    found = [[_marked(each.rule, outcome.rule) for each in outcome.findings] for outcome in group]
    first, second = ([names[place] if len(names) > place else NONE for names in found] for place in (0, 1))
    return [
        group[0].case,
        _marks(group),
        *map(_joined, (first, second, [name for names in found for name in names[2:]])),
        _joined(outcome.followed for outcome in group if outcome.followed),
    ]


def _healthy_row(group: Group) -> list[str]:
    findings = [found for outcome in group for found in outcome.findings]
    by_severity = ([each.rule for each in findings if each.severity == severity] for severity in SEVERITIES)
    return [group[0].case, _marks(group), *map(_joined, by_severity)]


def _marks(group: Group) -> str:
    return " ".join("✓" if outcome.good else "✗" for outcome in group)


def _joined(names: Iterable[str]) -> str:
    """Each name once, in order of appearance."""
    return ", ".join(dict.fromkeys(names)) or NONE


def _marked(name: str, rule: str) -> str:
    return f"**{name}**" if name == rule else name


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
