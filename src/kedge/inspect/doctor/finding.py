"""What the doctor says, and what a rule is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kedge.inspect.record import RunRecord

__all__ = ["DOCS", "Advice", "Direction", "Finding", "Remedy", "Rule", "Severity", "Symptom", "no_advice"]

Severity = Literal["serious", "warning", "note"]
Direction = Literal["too_high", "too_low", "switch"]

DOCS = "docs/doctor.md"

Advice = Callable[[str, Direction], str]
"""What the configuration says about a setting (its dotted name) that is too high or too low; empty where nothing."""


@dataclass(frozen=True)
class Finding:
    """Something about a run that calls for an answer.

    Attributes:
        rule: Name of the rule that found it.
        severity: `serious` spoils the run or its result; a `warning` may; a `note` costs time or is good to know.
        seen: The figures, and at which updates.
        means: What they come from.
        knob: The setting to turn first, by its dotted name; empty where none is to blame.
        direction: What is the matter with it; `switch` where it is a choice rather than a size.
        try_: What to do, in words.
        docs: Where to read on.
    """

    rule: str
    severity: Severity
    seen: str
    means: str
    knob: str
    direction: Direction
    try_: str
    docs: str

    def as_json(self) -> dict[str, str]:
        """The six fields of `kedge doctor --json`."""
        told = {"rule": self.rule, "severity": self.severity, "seen": self.seen, "means": self.means}
        return {**told, "try": self.try_, "docs": self.docs}


@dataclass(frozen=True)
class Remedy:
    """One thing to change.

    Attributes:
        knob: The setting, by its dotted name.
        direction: What is the matter with it.
        change: What to do about it: `ppo.learning_rate=1e-4`, a third of it.
    """

    knob: str
    direction: Direction
    change: str


@dataclass(frozen=True)
class Symptom:
    """That a rule applies to a run: how grave it is, what was seen, what helps.

    Attributes:
        severity: See `Finding`.
        seen: See `Finding`.
        remedies: The first is the one to begin with.
        advice: What helps where no setting does.
    """

    severity: Severity
    seen: str
    remedies: tuple[Remedy, ...] = ()
    advice: str = ""


@dataclass(frozen=True)
class Rule:
    """A fault, and how it shows.

    Attributes:
        name: What it is called, here and in the documentation.
        means: What is the matter where it shows.
        reads: The metrics that it looks at, `NAME` standing for a reward term's name.
        check: Looks for it. None where there is no sign of it, or too little to tell.
    """

    name: str
    means: str
    reads: tuple[str, ...]
    check: Callable[[RunRecord], Symptom | None]


def no_advice(knob: str, direction: Direction) -> str:
    """Nothing is known about settings."""
    return ""
