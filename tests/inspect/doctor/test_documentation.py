"""docs/doctor.md and the rules agree."""

from __future__ import annotations

import re
from pathlib import Path

from handbook.doctor import with_rules
from kedge.config import field_advice
from kedge.config.explain.describe import find_field
from kedge_inspect.doctor import diagnose
from tests.inspect.doctor.cases import CASES
from tests.inspect.doctor.synthetic import ALL_RULES, BY_NAME, metrics_read

DOCS = Path(__file__).resolve().parents[3] / "docs"


def test_the_sections_are_those_of_the_rules() -> None:
    page = (DOCS / "doctor.md").read_text(encoding="utf-8")
    assert with_rules(page) == page
    assert sorted(re.findall(r"^### (.+)$", page, re.MULTILINE)) == sorted(rule.name for rule in ALL_RULES)


def test_every_section_has_the_same_four_parts() -> None:
    for section in (DOCS / "doctor.md").read_text(encoding="utf-8").split("\n### ")[1:]:
        assert re.findall(r"^\*(\w+):\*", section, re.MULTILINE) == ["Seen", "Means", "Try", "Threshold"], section[:40]


def test_every_metric_that_a_rule_reads_is_documented() -> None:
    known = set(re.findall(r"`([^`]+)`", (DOCS / "metrics.md").read_text(encoding="utf-8")))
    named = "|".join(name.replace("NAME", r"\w+") for name in known if re.fullmatch(r"(reward|score)/NAME\w*", name))
    read = {name for case in CASES for name in metrics_read(BY_NAME[case.rule], case.faulty)}
    assert len(read) > 60
    assert [name for name in read if name not in known and not re.fullmatch(named, name)] == []
    assert known >= {"verdict/NAME/REASON", "critic/explained_variance", "critic/pairs_within", "critic/pairs_across"}


def test_every_finding_links_to_its_section_and_names_an_existing_field() -> None:
    for case in CASES:
        for finding in diagnose(case.faulty, advice=field_advice):
            assert finding.docs == f"docs/doctor.md#{finding.rule}"
            assert not finding.field or find_field(finding.field), finding.field
            assert finding.try_, finding.rule


def test_the_configuration_explains_every_field_that_is_too_high_or_too_low() -> None:
    for case in CASES:
        for finding in diagnose(case.faulty):
            if finding.field and finding.direction != "switch":
                assert field_advice(finding.field, finding.direction), (finding.rule, finding.field)
