"""Mistakes in the doctor that are not about a threshold: those have tests on both sides."""

from __future__ import annotations

from tests.mutation import Mutation

__all__ = ["DOCTOR"]

DIAGNOSIS = "tests/inspect/doctor/test_diagnosis.py"
COURSES = "tests/inspect/doctor/test_courses.py"
VISITS = "tests/inspect/test_diagnosis.py"

DOCTOR = (
    Mutation(
        "findings-in-the-order-of-the-rules",
        "inspect/doctor/registry.py",
        "return sorted((_finding(rule, symptom, advice) for rule, symptom in found), key=graver)",
        "return [_finding(rule, symptom, advice) for rule, symptom in found]",
        f"{DIAGNOSIS}::test_the_gravest_come_first_and_causes_before_their_consequences",
    ),
    Mutation(
        "noise-taken-for-a-trend",
        "inspect/doctor/courses.py",
        "TREND and found.rise > CERTAIN * found.error",
        "TREND and found.rise > 0",
        f"{COURSES}::test_a_rise_counts_from_three_errors_on",
    ),
    Mutation(
        "the-live-doctor-repeats-itself",
        "inspect/diagnosis.py",
        " and finding.rule not in self._said",
        "",
        f"{VISITS}::test_a_run_at_work_is_told_of_each_serious_thing_once_and_early",
    ),
    Mutation(
        "warnings-in-the-exit-code",
        "cli/inspect.py",
        'any(finding.severity == "serious" for finding in findings)',
        "bool(findings)",
        f"{VISITS}::test_the_exit_code_tells_whether_something_serious_was_found",
    ),
)
