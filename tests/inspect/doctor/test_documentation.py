"""docs/doctor.md and the rules tell of the same."""

from __future__ import annotations

import re
from pathlib import Path

from kedge.config import field_advice
from kedge.config.explain.describe import find_field
from kedge.inspect.doctor import RULES, diagnose
from kedge.inspect.doctor.agreement import MAX_RATIO
from kedge.training.guard.guard import MAX_RATIO as GUARDED
from tests.inspect.doctor.cases import CASES

DOCS = Path(__file__).resolve().parents[3] / "docs"


def test_every_rule_has_its_section_and_every_section_its_rule() -> None:
    sections = re.findall(r"^### (.+)$", (DOCS / "doctor.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(sections) == sorted(rule.name for rule in RULES)


def test_every_section_says_what_is_seen_what_it_means_and_what_to_try() -> None:
    for section in (DOCS / "doctor.md").read_text(encoding="utf-8").split("\n### ")[1:]:
        assert re.findall(r"^\*(\w+):\*", section, re.MULTILINE) == ["Seen", "Means", "Try"], section[:40]


def test_every_metric_that_a_rule_reads_is_documented() -> None:
    known = set(re.findall(r"`([^`]+)`", (DOCS / "metrics.md").read_text(encoding="utf-8")))
    assert {name for rule in RULES for name in rule.reads} <= known


def test_every_finding_leads_to_its_section_and_to_settings_that_exist() -> None:
    for case in CASES:
        for finding in diagnose(case.sick, advice=field_advice):
            assert finding.docs == f"docs/doctor.md#{finding.rule}"
            assert not finding.knob or find_field(finding.knob), finding.knob
            assert finding.try_, finding.rule


def test_what_is_too_high_or_too_low_is_explained_by_the_configuration() -> None:
    for case in CASES:
        for finding in diagnose(case.sick):
            if finding.knob and finding.direction != "switch":
                assert field_advice(finding.knob, finding.direction), (finding.rule, finding.knob)


def test_what_rounding_explains_is_what_the_guard_allows() -> None:
    assert MAX_RATIO == GUARDED
