"""What a rule needs to judge a run: without it, no finding does not mean that nothing is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kedge.inspect.record import RunRecord
from kedge.inspect.resolved import value_warmup_of

__all__ = ["TRAINED", "WHY_MISSING", "Gap", "Needs", "gaps_in_words"]

TRAINED = ("sft", "reward", "critic", "ppo")
"""The stages that the doctor has rules for."""

PPO = ("ppo",)

WHY_MISSING = {
    "objective/kl": "the KL was not measured (ppo.measure_kl=true measures it)",
    "reward/kl": "the KL was not measured (ppo.measure_kl=true measures it)",
    "eval/loss": "nothing was held out (data.eval_fraction)",
}
"""Why a run may lack a metric, where a setting decides it."""

Answer = Callable[[RunRecord], str]


def always(run: RunRecord) -> bool:
    """A rule that fits every configuration."""
    return True


def nothing_else(run: RunRecord) -> str:
    """No further requirement."""
    return ""


@dataclass(frozen=True)
class Gap:
    """A rule that could not judge a run.

    Attributes:
        rule: Its name.
        reason: Why not.
        updates: The updates that it needs, if there are too few; else 0.
    """

    rule: str
    reason: str
    updates: int = 0

    @property
    def why(self) -> str:
        """The reason in words."""
        return self.reason or f"it needs {self.updates} updates or steps"


@dataclass(frozen=True)
class Needs:
    """The requirements of a rule.

    Attributes:
        metrics: Metrics that it reads in any case; of `one|other`, one is enough.
        updates: How many updates need to have them.
        stages: The stages that it is about.
        of_policy: Whether the updates that train the critic alone do not count.
        fits: Whether it is about a run with these settings at all.
        lacks: What else is missing, or an empty text.
    """

    metrics: tuple[str, ...] = ()
    updates: int = 1
    stages: tuple[str, ...] = PPO
    of_policy: bool = False
    fits: Callable[[RunRecord], bool] = always
    lacks: Answer = nothing_else

    def concerns(self, run: RunRecord) -> bool:
        """Whether the rule is about this stage and these settings. A run without a stage may be any."""
        return (not run.stage or run.stage in self.stages) and self.fits(run)

    def gap(self, rule: str, run: RunRecord) -> Gap | None:
        """Why the rule cannot judge the run; None if it can."""
        if reason := self.lacks(run):
            return Gap(rule, reason)
        counts = {name: self._count(run, name.split("|")) for name in self.metrics}
        missing = next((name for name, count in counts.items() if count == 0), None)
        if missing is not None and run.metrics:
            return Gap(rule, WHY_MISSING.get(missing, f"{missing.replace('|', ' or ')} was not recorded"))
        if min([len(run.metrics), *counts.values()]) < self.updates:
            return Gap(rule, "", self.updates)
        return None

    def _count(self, run: RunRecord, names: Iterable[str]) -> int:
        skipped = value_warmup_of(run) if self.of_policy else 0
        return max(_finite(run, name, after=skipped) for name in names)


def gaps_in_words(run: RunRecord, gaps: Sequence[Gap]) -> str:
    """One line: `3 need 8 to 12 updates, and the run has 6; nothing was held out (data.eval_fraction)`."""
    short = [gap.updates for gap in gaps if gap.updates]
    reasons = dict.fromkeys(gap.reason for gap in gaps if not gap.updates)
    counts = {reason: sum(gap.reason == reason for gap in gaps) for reason in reasons}
    return "; ".join(
        ([_too_short(run, short)] if short else [])
        + [f"{count} because {reason}" if len(gaps) > 1 else reason for reason, count in counts.items()]
    )


def _too_short(run: RunRecord, needed: Sequence[int]) -> str:
    low, high = min(needed), max(needed)
    unit = "updates" if run.stage in ("ppo", "control", "") else "steps"
    span = f"{high}" if low == high else f"{low} to {high}"
    verb = "needs" if len(needed) == 1 else "need"
    return f"{len(needed)} {verb} {span} {unit}, and the run has {len(run.metrics)}"


def _finite(run: RunRecord, name: str, *, after: int) -> int:
    """The number of updates with a finite value of a metric."""
    updates, values = run.series(name)
    return sum(update > after and math.isfinite(value) for update, value in zip(updates, values, strict=True))
