"""Mistakes in the doctor other than wrong thresholds, which have tests on both sides."""

from __future__ import annotations

from tests.mutation import Mutation

__all__ = ["DOCTOR"]

DIAGNOSIS = "tests/inspect/doctor/test_diagnosis.py"
TRENDS = "tests/inspect/doctor/test_trends.py"
RUNS = "tests/inspect/test_diagnosis.py"

DOCTOR = (
    Mutation(
        "findings-in-the-order-of-the-rules",
        "inspect/doctor/registry.py",
        "return sorted((_finding(rule, symptom, advice) for rule, symptom in found), key=severity_rank)",
        "return [_finding(rule, symptom, advice) for rule, symptom in found]",
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
        "warnings-in-the-exit-code",
        "cli/inspect.py",
        'any(finding.severity == "serious" for finding in findings)',
        "bool(findings)",
        f"{RUNS}::test_the_exit_code_is_1_for_serious_findings_only",
    ),
)
