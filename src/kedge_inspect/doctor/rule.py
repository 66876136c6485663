"""A rule of the doctor: its needs, its check for a problem, and its remedies."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from kedge_base.run_folder.record_format import OF_SCORES
from kedge_base.texts import printable
from kedge_inspect.doctor.series import read
from kedge_inspect.record import RunRecord, is_number
from kedge_inspect.resolved import learns_from_teacher

Severity = Literal["serious", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)
Direction = Literal["too_high", "too_low", "switch"]

DOCS = "docs/doctor.md"

Advice = Callable[[str, Direction], str]
"""Looks up the configuration's text about a field (dotted name) that is too high or too low; empty if there is none."""


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
        try_: Changes to try.
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
class Change:
    """One change to the configuration.

    Attributes:
        field: The field, by its dotted name, or its entry in `schedules`.
        direction: Whether it is too high or too low.
        text: The instruction: `lower ppo.learning_rate from 0.0003 to 0.0001`.
        value: The new value; None if none can be suggested.
    """

    field: str
    direction: Direction
    text: str
    value: Any = None


Remedy = Callable[[RunRecord], Change]
"""Computes a change from a run's current settings."""


@dataclass(frozen=True)
class Symptom:
    """A rule's finding in one run.

    Attributes:
        severity: How serious it is; see `Finding`.
        seen: The figures that show it; see `Finding`.
        remedies: Fields to change, the most promising first.
        advice: Actions other than changing fields.
    """

    severity: Severity
    seen: str
    remedies: Iterable[Remedy] = ()
    advice: str = ""


TRAINED = ("sft", "reward", "critic", "ppo")
"""The stages for which the doctor has rules."""

PPO = ("ppo",)

WHY_MISSING = {
    "objective/kl": "the KL was not measured (ppo.measure_kl=true measures it)",
    "reward/kl": "the KL was not measured (ppo.measure_kl=true measures it)",
    "eval/loss": "nothing was held out (data.eval_fraction)",
}
"""Reasons why a run may lack a metric because of a setting."""


@dataclass(frozen=True)
class Gap:
    """A rule that could not judge a run.

    Attributes:
        rule: Its name.
        reason: Why not.
        updates: The number of updates that it needs, if there are too few; otherwise 0.
        needs: The metric that it needs and the log of another library lacks; otherwise empty.
    """

    rule: str
    reason: str
    updates: int = 0
    needs: str = ""

    @property
    def why(self) -> str:
        """The reason in words."""
        return self.reason or (f"it needs {self.needs}" if self.needs else f"it needs {self.updates} updates or steps")


@dataclass(frozen=True)
class Rule:
    """One kind of problem and how to detect it.

    Attributes:
        name: Its name here and in the documentation.
        means: The problem, in one or two sentences.
        check: Checks for it, given the run, the series of `needs`, and `figures`. Returns None without signs of it. Its
            docstring is the documentation.
        needs: Metrics without which the rule cannot clear a run. Of `one|other`, one is enough; the check then reads
            them itself.
        figures: Results in `summary.json`, numbers or intervals, without which there is nothing to check.
        early: Checks for it if the run lacks the series, the figures or anything else.
        updates: Minimum number of updates with the metrics.
        stages: The stages that it is about.
        of_policy: Whether the updates that train the critic alone do not count.
        of_reward: Whether it judges the effect of a reward on the policy, so that it does not apply to runs that learn
            only from a teacher, which determines length and entropy. Rules that need scores need not set it.
        fits: True if it applies to a run with these settings. False if a setting turns off what the rule needs, which
            then does not count as a check that could not be made.
        lacks: Anything else that is missing, so that `check` is not called; or an empty text.
    """

    name: str
    means: str
    check: Callable[..., Symptom | None]
    needs: tuple[str, ...] = ()
    figures: tuple[str, ...] = ()
    early: Callable[[RunRecord], Symptom | None] = lambda run: None
    updates: int = 1
    stages: tuple[str, ...] = PPO
    of_policy: bool = False
    of_reward: bool = False
    fits: Callable[[RunRecord], bool] = lambda run: True
    lacks: Callable[[RunRecord], str] = lambda run: ""

    def find(self, run: RunRecord) -> Symptom | None:
        """Look for the problem in a run; None without a sign of it, with too little data, or if it does not apply."""
        if not self._applies(run):
            return None
        metrics = (name for name in self.needs if "|" not in name)
        given: list[Any] = [read(run, name, at_least=self.updates, of_policy=self.of_policy) for name in metrics]
        given += [_figure(run, name) for name in self.figures]
        return self.early(run) if None in given or self.lacks(run) else self.check(run, *given)

    def concerns(self, run: RunRecord) -> bool:
        """True if the rule applies to the run's stage and settings; a run without a stage can belong to any."""
        return (not run.stage or run.stage in self.stages) and self._applies(run)

    def _applies(self, run: RunRecord) -> bool:
        needs_reward = self.of_reward or any(name.startswith(OF_SCORES) for name in self.needs)
        return self.fits(run) and not (needs_reward and learns_from_teacher(run))

    def gap(self, run: RunRecord) -> Gap | None:
        """The reason why the rule cannot judge the run; None if it can."""
        if reason := self.lacks(run):
            return Gap(self.name, reason.partition(" (ppo.")[0] if run.trainer else reason)
        counts = {name: self._count(run, name.split("|")) for name in self.needs}
        missing = next((name for name, count in counts.items() if count == 0), None)
        if missing is not None and run.metrics:
            named = missing.replace("|", " or ")
            if run.trainer:
                return Gap(self.name, "", needs=named)
            return Gap(self.name, WHY_MISSING.get(missing, f"{named} was not recorded"))
        if min([len(run.metrics), *counts.values()]) < self.updates:
            return Gap(self.name, "", self.updates)
        return None

    def _count(self, run: RunRecord, names: Iterable[str]) -> int:
        """The number of updates with a finite value of one of these metrics."""
        return max(len(read(run, name, at_least=1, of_policy=self.of_policy) or ()) for name in names)


def _figure(run: RunRecord, name: str) -> float | Mapping[str, Any] | None:
    """Read a figure of a run's summary; None if it is missing, or an interval without bounds (of a single prompt)."""
    value = run.summary.get(name)
    is_known = is_number(value) or (isinstance(value, Mapping) and value.get("low", 0) is not None)
    return value if is_known else None


def rule(means: str, **options: Any) -> Callable[[Callable[..., Symptom | None]], Rule]:
    """Turn a check into a rule of the same name; see `Rule` for the options."""
    return lambda check: Rule(check.__name__, means, check, **options)


def severity_rank(finding: Finding | Symptom) -> int:
    """Sort key: 0 for serious; a stable sort keeps causes before consequences."""
    return SEVERITIES.index(finding.severity)


def no_advice(field: str, direction: Direction) -> str:
    """An `Advice` with no texts."""
    return ""


LARGEST_SHARE = 0.5
"""Maximum to which a share of the rows or steps is raised."""

SCHEDULES = "schedules."
"""Prefix of a scheduled field's name: the section with schedules, and a dot."""

VERBS: dict[Direction, str] = {"too_high": "lower", "too_low": "raise", "switch": "change"}


def scale(field: str, factor: float) -> Remedy:
    """Multiply a field by a factor.

    Args:
        field: Its dotted name.
        factor: Below 1 if the field is too high.
    """
    direction: Direction = "too_high" if factor < 1 else "too_low"

    def change(run: RunRecord) -> Change:
        if points := _schedule(run, field):
            values = {update: _two_digits(value * factor) for update, value in points.items()}
            if field in WHOLE or values == points:
                return adjust(field, direction)(run)
            text = f"{VERBS[direction]} {SCHEDULES}{field} from {_written(points)} to {_written(values)}"
            return Change(f"{SCHEDULES}{field}", direction, text, values)
        value = present = run.setting(field)
        if isinstance(present, int) and present:
            value = _allowed(run, field, max(1, (math.floor if factor < 1 else math.ceil)(present * factor)))
        elif is_number(present):
            value = _allowed(run, field, _two_digits(present * factor))
        return (adjust(field, direction) if value == present else set_to(field, value, direction))(run)

    return change


def _two_digits(value: float) -> float:
    return float(f"{value:.2g}")


def _schedule(run: RunRecord, field: str) -> Mapping[Any, float]:
    """The values of a scheduled field, by update; empty for a constant field."""
    schedules = run.setting("schedules")
    return schedules.get(field) or {} if isinstance(schedules, Mapping) else {}


WHOLE = ("ppo.num_epochs", "rollout.max_new_tokens")
"""Scheduled fields without a suggestion: scaling rarely gives an integer, and the second field has another limit."""


def _allowed(run: RunRecord, field: str, value: float) -> float:
    """The nearest value with which the configuration loads: shares below 1, whole epochs, minibatches of equal size."""
    if field.endswith("_fraction"):
        return min(value, LARGEST_SHARE)
    if field == "ppo.num_epochs" and value > 1:
        return round(value)
    counts = ("rollout.num_prompts", "rollout.num_responses")
    if field in counts:
        other = run.setting(counts[field == counts[0]]) or 1
        parts = run.setting("ppo.num_minibatches") or 1
        step = parts // math.gcd(parts, other)
        return max(step, round(value / step) * step)
    return value


def set_to(field: str, value: Any, direction: Direction = "switch", why: str = "") -> Remedy:
    """Set a field to a value.

    Args:
        field: Its dotted name.
        value: The new value.
        direction: Whether the present value is too high or too low; `switch` if it is a choice rather than a size.
        why: The purpose, if the configuration does not explain it: `to skip such steps`.
    """

    def change(run: RunRecord) -> Change:
        if _schedule(run, field):
            text = f"set {SCHEDULES}{field}={{1: {_written(value)}}} {why}".rstrip()
            return Change(f"{SCHEDULES}{field}", direction, text, {1: value})
        present = run.setting(field)
        if direction != "switch" and is_number(present) and (value < present) == (direction == "too_high"):
            text = f"{VERBS[direction]} {field} from {_written(present)} to {_written(value)}"
        else:
            text = f"set {field}={_written(value)}"
        return Change(field, direction, f"{text} {why}".rstrip(), value)

    return change


def adjust(field: str, direction: Direction) -> Remedy:
    """Lower or raise a field for which no value can be suggested."""

    def change(run: RunRecord) -> Change:
        present = run.setting(field)
        now = "" if present is None else f" (now {_written(present)})"
        return Change(field, direction, f"{VERBS[direction]} {field}{now}")

    return change


def instruct(field: str, text: str) -> Remedy:
    """Change what a field names, in words: no value can be suggested."""
    return lambda run: Change(field, "switch", text)


SMALLER_STEPS = scale("ppo.learning_rate", 1 / 3)


def _written(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name}: {_written(each)}' for name, each in value.items())}}}"
    return f"{value:g}" if isinstance(value, float) else str(value)
