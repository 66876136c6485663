"""Every rule finds its fault, and is silent just on the other side of it."""

from __future__ import annotations

import pytest

from kedge.report.doctor import RULES, diagnose
from tests.report.doctor.cases import CASES, Case
from tests.report.doctor.synthetic import made_up


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.rule}-{case.severity}")
def test_a_rule_finds_its_fault_and_nothing_short_of_it(case: Case) -> None:
    [found] = [finding for finding in diagnose(case.sick) if finding.rule == case.rule]
    assert found.severity == case.severity
    assert case.rule not in [finding.rule for finding in diagnose(case.well)]


def test_every_rule_has_a_case() -> None:
    assert {case.rule for case in CASES} == {rule.name for rule in RULES}


@pytest.mark.parametrize("updates", [0, 1, 2, 3, 4, 7, 8, 12, 16, 100])
def test_of_a_run_that_is_well_nothing_is_said(updates: int) -> None:
    assert diagnose(made_up(updates)) == []
