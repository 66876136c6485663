"""Mistakes in the doctor other than wrong thresholds, which have tests on both sides."""

from __future__ import annotations

from tests.mutation import Mutation

__all__ = ["DOCTOR"]

DIAGNOSIS = "tests/inspect/doctor/test_diagnosis.py"
TRENDS = "tests/inspect/doctor/test_trends.py"
RUNS = "tests/inspect/test_diagnosis.py"

JUDGED = "tests/inspect/page/test_judged.py"

DOCTOR = (
    Mutation(
        "agreement-by-chance-of-one-judge",
        "inspect/page/judge_agreement.py",
        "sum(first == outcome for first, _ in pairs) * sum(second == outcome for _, second in pairs) / count**2",
        "sum(first == outcome for first, _ in pairs) ** 2 / count**2",
        f"{JUDGED}::test_agreement_of_judges_by_hand",
    ),
    Mutation(
        "findings-in-the-order-of-the-rules",
        "inspect/doctor/registry.py",
        "tuple(sorted(findings, key=severity_rank)),",
        "tuple(findings),",
        f"{DIAGNOSIS}::test_the_most_severe_come_first_and_causes_before_consequences",
    ),
    Mutation(
        "noise-taken-for-a-trend",
        "inspect/doctor/trends.py",
        "MIN_TREND and series.rise > SIGNIFICANT * series.rise_error",
        "MIN_TREND and series.rise > 0",
        f"{TRENDS}::test_a_rise_is_significant_from_three_errors_on",
    ),
    Mutation(
        "the-live-doctor-repeats-itself",
        "inspect/diagnosis.py",
        " and finding.rule not in self._reported",
        "",
        f"{RUNS}::test_a_serious_finding_is_reported_once_and_early",
    ),
    Mutation(
        "a-short-run-counted-as-examined",
        "inspect/doctor/registry.py",
        "len(findings) + len(silent) - len(gaps),",
        "len(findings) + len(silent),",
        f"{DIAGNOSIS}::test_a_short_run_says_what_could_not_be_judged",
    ),
    Mutation(
        "dropped-responses-counted-as-documented-none",
        "inspect/doctor/rewards.py",
        "max(0.0, count - failed.get(update, 0.0))",
        "max(0.0, count)",
        "tests/inspect/doctor/test_rules.py::test_severity_on_both_sides_of_each_threshold",
    ),
    Mutation(
        "the-first-update-is-judged-like-any-other",
        "inspect/diagnosis.py",
        "if update < self._next and not is_among_first:",
        "if update < self._next:",
        f"{RUNS}::test_a_serious_finding_is_reported_once_and_early",
    ),
    Mutation(
        "warnings-in-the-exit-code",
        "cli/inspect.py",
        'any(finding.severity == "serious" for finding in findings)',
        "bool(findings)",
        f"{RUNS}::test_the_exit_code_is_1_for_serious_findings_only",
    ),
)
