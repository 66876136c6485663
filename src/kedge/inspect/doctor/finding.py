"""Findings, and the rules, symptoms and remedies behind them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from kedge.inspect.doctor.needs import Needs
from kedge.inspect.record import RunRecord
from kedge.system.texts import printable

__all__ = [
    "DOCS",
    "Advice",
    "Direction",
    "Finding",
    "Remedy",
    "Rule",
    "Severity",
    "Symptom",
    "no_advice",
    "severity_rank",
]

Severity = Literal["serious", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)
Direction = Literal["too_high", "too_low", "switch"]

DOCS = "docs/doctor.md"

Advice = Callable[[str, Direction], str]
"""Looks up the configuration's text on a field (dotted name) that is too high or too low; empty if there is none."""


@dataclass(frozen=True, repr=False)
class Finding:
    """One problem found in a run.

    Attributes:
        rule: Name of the rule.
        severity: `serious` means the run or its result is broken, `warning` that it may be, `note` is for information.
        seen: The figures and the updates that show it.
        means: The explanation.
        field: The configuration field to change first, by its dotted name; empty if no field is to blame.
        direction: Whether that field is too high or too low; `switch` if it is a choice rather than a size.
        try_: What to change.
        docs: Where to read more.
        changes: The fields of `try_` that have a new value, by dotted name.
    """

    rule: str
    severity: Severity
    seen: str
    means: str
    field: str
    direction: Direction
    try_: str
    docs: str
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __repr__(self) -> str:
        return printable(f"<{self.severity} {self.rule}: {self.seen}>")

    def as_json(self) -> dict[str, str]:
        """The six keys of `kedge doctor --json`."""
        shown = {"rule": self.rule, "severity": self.severity, "seen": self.seen, "means": self.means}
        return {**shown, "try": self.try_, "docs": self.docs}


@dataclass(frozen=True)
class Remedy:
    """One change to the configuration.

    Attributes:
        field: The field, by its dotted name.
        direction: Whether it is too high or too low.
        change: The instruction: `lower ppo.learning_rate from 0.0003 to 0.0001`.
        value: The new value; None if none can be suggested.
    """

    field: str
    direction: Direction
    change: str
    value: Any = None


@dataclass(frozen=True)
class Symptom:
    """What a rule found in one run.

    Attributes:
        severity: See `Finding`.
        seen: See `Finding`.
        remedies: Fields to change, the most promising first.
        advice: What to do apart from changing fields.
    """

    severity: Severity
    seen: str
    remedies: tuple[Remedy, ...] = ()
    advice: str = ""


@dataclass(frozen=True)
class Rule:
    """One kind of problem and how to detect it.

    Attributes:
        name: Its name here and in the documentation.
        means: What it is, in one or two sentences.
        reads: The metrics it reads; `NAME` stands for the name of a reward term.
        check: Looks for it. None if there is no sign of it, or too little data.
        needs: What a run must have for None to mean that there is no sign of it.
    """

    name: str
    means: str
    reads: tuple[str, ...]
    check: Callable[[RunRecord], Symptom | None]
    needs: Needs


def severity_rank(finding: Finding) -> int:
    """Sort key: 0 for serious; a stable sort keeps causes before consequences."""
    return SEVERITIES.index(finding.severity)


def no_advice(field: str, direction: Direction) -> str:
    """An `Advice` with no texts."""
    return ""
