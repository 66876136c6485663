"""Every rule finds its problem, and nothing just short of its threshold."""

from __future__ import annotations

import pytest

from kedge.inspect.doctor import diagnose
from tests.inspect.doctor.cases import CASES, Case
from tests.inspect.doctor.edges import EDGES, MIN_UPDATES, Edge
from tests.inspect.doctor.synthetic import ALL_RULES, synthetic_run


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.rule}-{case.severity}")
def test_a_rule_finds_its_problem_and_nothing_short_of_it(case: Case) -> None:
    [found] = [finding for finding in diagnose(case.faulty) if finding.rule == case.rule]
    assert found.severity == case.severity
    assert case.rule not in [finding.rule for finding in diagnose(case.healthy)]


@pytest.mark.parametrize("edge", EDGES, ids=lambda edge: f"{edge.rule}-{edge.severity or 'silent'}")
def test_severity_on_both_sides_of_each_threshold(edge: Edge) -> None:
    found = {finding.rule: finding.severity for finding in diagnose(edge.run)}
    assert found.get(edge.rule, "") == edge.severity


@pytest.mark.parametrize("rule", MIN_UPDATES)
def test_a_rule_needs_a_minimum_of_updates(rule: str) -> None:
    minimum, faulty = MIN_UPDATES[rule]
    for updates, expected in ((minimum, True), (minimum - 1, False)):
        found = diagnose(synthetic_run(updates, {name: [value] * updates for name, value in faulty.items()}))
        assert (rule in [finding.rule for finding in found]) == expected, updates


def test_every_rule_has_a_case() -> None:
    assert {case.rule for case in CASES} == {rule.name for rule in ALL_RULES}


@pytest.mark.parametrize("updates", [0, 1, 2, 3, 4, 7, 8, 12, 16, 100])
def test_a_healthy_run_has_no_findings(updates: int) -> None:
    assert diagnose(synthetic_run(updates)) == []
