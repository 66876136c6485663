"""Every rule finds its fault, and is silent just on the other side of it."""

from __future__ import annotations

import pytest

from kedge.inspect.doctor import RULES, diagnose
from tests.inspect.doctor.cases import CASES, Case
from tests.inspect.doctor.edges import EDGES, LEAST, Edge
from tests.inspect.doctor.synthetic import made_up


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.rule}-{case.severity}")
def test_a_rule_finds_its_fault_and_nothing_short_of_it(case: Case) -> None:
    [found] = [finding for finding in diagnose(case.sick) if finding.rule == case.rule]
    assert found.severity == case.severity
    assert case.rule not in [finding.rule for finding in diagnose(case.well)]


@pytest.mark.parametrize("edge", EDGES, ids=lambda edge: f"{edge.rule}-{edge.severity or 'silent'}")
def test_a_threshold_lies_where_it_is_said_to(edge: Edge) -> None:
    found = {finding.rule: finding.severity for finding in diagnose(edge.run)}
    assert found.get(edge.rule, "") == edge.severity


@pytest.mark.parametrize("rule", LEAST)
def test_a_rule_waits_until_there_is_enough_to_tell(rule: str) -> None:
    least, sick = LEAST[rule]
    for updates, expected in ((least, True), (least - 1, False)):
        found = diagnose(made_up(updates, {name: [figure] * updates for name, figure in sick.items()}))
        assert (rule in [finding.rule for finding in found]) == expected, updates


def test_every_rule_has_a_case() -> None:
    assert {case.rule for case in CASES} == {rule.name for rule in RULES}


@pytest.mark.parametrize("updates", [0, 1, 2, 3, 4, 7, 8, 12, 16, 100])
def test_of_a_run_that_is_well_nothing_is_said(updates: int) -> None:
    assert diagnose(made_up(updates)) == []
