"""What the doctor says about a run: its findings, and what it could not judge."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kedge.inspect.doctor.finding import Finding, severity_rank
from kedge.inspect.doctor.needs import Gap

__all__ = ["Examination", "merge"]


@dataclass(frozen=True)
class Examination:
    """The result of all checks of a run.

    Attributes:
        findings: The problems, most severe first.
        num_checks: How many rules could judge the run.
        gaps: The rules that could not, and why; those for other stages or settings are left out.
        unjudged: The reasons, in one line; empty without gaps.
        until: ` so far` or ` before it stopped`, for a run that has not finished.
        ended_early: Why the run ended before its last update; empty if it did not.
    """

    findings: tuple[Finding, ...]
    num_checks: int
    gaps: tuple[Gap, ...] = ()
    unjudged: str = ""
    until: str = ""
    ended_early: str = ""

    @property
    def is_clean(self) -> bool:
        """Whether something was checked and nothing is wrong."""
        return self.num_checks > 0 and not self.findings

    @property
    def verdict(self) -> str:
        """One line: `nothing wrong in 31 checks; 7 could not be made: 7 need 8 to 12 updates, and the run has 6`."""
        if not self.num_checks:
            return f"nothing was checked: {self.unjudged or 'there are no rules for this stage'}"
        missed = f"; {len(self.gaps)} could not be made: {self.unjudged}" if self.gaps else ""
        return f"{self._summary} in {self._checks}{self.until}{missed}"

    @property
    def _checks(self) -> str:
        return f"{self.num_checks} check{'' if self.num_checks == 1 else 's'}"

    @property
    def _summary(self) -> str:
        counts = Counter(finding.severity for finding in self.findings)
        parts = [f"{count} {severity if count == 1 or severity == 'serious' else severity + 's'}"
                 for severity, count in counts.items()]  # fmt: skip
        return ", ".join(parts) or "nothing wrong"

    def as_json(self) -> dict[str, Any]:
        """The content of `kedge doctor --json`."""
        return {
            "findings": [finding.as_json() for finding in self.findings],
            "checks": self.num_checks,
            "not_judged": [{"rule": gap.rule, "why": gap.why} for gap in self.gaps],
            "verdict": self.verdict,
            "ended_early": self.ended_early,
        }


def merge(parts: Iterable[Examination]) -> Examination:
    """The examinations of several runs as one: findings by severity, sums, and each reason once."""
    examined = list(parts)
    if len(examined) == 1:
        return examined[0]
    findings = sorted((finding for each in examined for finding in each.findings), key=severity_rank)
    return Examination(
        tuple(findings),
        sum(each.num_checks for each in examined),
        tuple(gap for each in examined for gap in each.gaps),
        "; ".join(dict.fromkeys(each.unjudged for each in examined if each.unjudged)),
        ended_early="; ".join(each.ended_early for each in examined if each.ended_early),
    )
