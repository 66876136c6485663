"""Order and texts of findings, and diagnoses with missing metrics."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from kedge.inspect.doctor import RULES, Finding, diagnose, one_line, print_findings
from kedge.inspect.record import RunRecord
from tests.inspect.doctor.cases import CASES
from tests.inspect.doctor.synthetic import HEALTHY, run_with, synthetic_run, towards

FAST = {
    "policy/clip_fraction": towards(0.5, 0.4),
    "objective/kl": towards(0.0, 60.0),
    "response/eos_rate": [0.8] * 16,
    "policy/staleness": 1.0,
}
"""Steps that are far too large, and their consequences."""


def test_the_most_severe_come_first_and_causes_before_consequences() -> None:
    found = [(finding.severity, finding.rule) for finding in diagnose(synthetic_run(metrics=FAST))]
    assert found == [
        ("serious", "steps_too_large"),
        ("serious", "kl_exploding"),
        ("warning", "stale_rollouts"),
        ("warning", "truncated_at_cap"),
    ]


def test_rule_names_are_unique() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)


@pytest.mark.parametrize("missing", sorted(HEALTHY))
def test_other_rules_still_apply_if_a_metric_is_missing(missing: str) -> None:
    assert diagnose(synthetic_run(metrics={missing: None})) == []
    for case in CASES:
        rows = [{name: value for name, value in row.items() if name != missing} for row in case.faulty.metrics]
        reduced = RunRecord(
            case.faulty.folder, case.faulty.facts, case.faulty.config, rows, summary=case.faulty.summary
        )
        read = next(rule.reads for rule in RULES if rule.name == case.rule)
        if missing not in read and not case.faulty.incidents:
            assert case.rule in [finding.rule for finding in diagnose(reduced)], case.rule


def test_every_metric_that_a_rule_needs_is_in_reads() -> None:
    for case in CASES:
        reads = {name for rule in RULES if rule.name == case.rule for name in rule.reads}
        rows = [
            {name: value for name, value in row.items() if name == "update" or _is_read(name, reads)}
            for row in case.faulty.metrics
        ]
        reduced = RunRecord(
            case.faulty.folder, case.faulty.facts, case.faulty.config, rows,
            incidents=case.faulty.incidents, summary=case.faulty.summary,
        )  # fmt: skip
        assert case.rule in [finding.rule for finding in diagnose(reduced)], case.rule


def _is_read(name: str, reads: set[str]) -> bool:
    head, _, tail = name.partition("/")
    return name in reads or f"{head}/NAME" in reads or f"{head}/NAME_{tail.partition('_')[2]}" in reads


def test_a_run_without_a_configuration_is_diagnosed() -> None:
    for case in CASES:
        diagnose(RunRecord(case.faulty.folder, metrics=case.faulty.metrics))


def test_null_values_are_left_out() -> None:
    holes = [None if update % 3 else 2.0 for update in range(16)]
    assert diagnose(synthetic_run(metrics={"objective/kl": holes})) == []  # pyright: ignore[reportArgumentType]


def test_a_suggested_value_follows_from_the_present_one() -> None:
    [finding] = diagnose(
        synthetic_run(metrics={"policy/clip_fraction": [0.5] * 16}), advice=lambda field, direction: "why"
    )
    assert finding.try_.startswith("lower ppo.learning_rate from 0.0003 to 0.0001 (if too high: why); ")
    assert (finding.field, finding.direction) == ("ppo.learning_rate", "too_high")


@pytest.mark.parametrize(("epochs", "first"), [(5, "ppo.num_epochs"), (4, "ppo.learning_rate")])
def test_more_epochs_than_in_the_papers_are_reduced_first(epochs: int, first: str) -> None:
    run = synthetic_run(metrics={"policy/clip_fraction": [0.5] * 16}, settings={"ppo.num_epochs": epochs})
    assert [finding.field for finding in diagnose(run)] == [first]


@pytest.mark.parametrize(("start", "warmup"), [(0, True), (3, False)])
def test_warmup_is_suggested_if_the_first_steps_go_too_far(start: int, warmup: bool) -> None:
    clipped = [0.01] * start + [0.5] * 3 + [0.01] * (13 - start)
    [finding] = diagnose(synthetic_run(metrics={"policy/clip_fraction": clipped}))
    assert ("raise ppo.warmup_fraction from 0 to 0.1" in finding.try_) == warmup


def test_json_has_six_fields() -> None:
    [finding] = diagnose(synthetic_run(metrics={"prompt/distinct": [0.5] * 16}))
    assert list(finding.as_json()) == ["rule", "severity", "seen", "means", "try", "docs"]
    assert finding.as_json()["try"] == finding.try_


def test_four_updates_are_enough_for_what_is_wrong_from_the_start() -> None:
    rows = {"policy/clip_fraction": [0.5] * 4, "policy/approx_kl": [0.3] * 4}
    assert [finding.rule for finding in diagnose(run_with(4, rows))] == ["steps_too_large"]
    assert diagnose(run_with(3, {name: figures[:3] for name, figures in rows.items()})) == []


def test_a_single_outlier_is_no_finding() -> None:
    odd = {"policy/clip_fraction": [0.01] * 8 + [0.9] + [0.01] * 7, "objective/kl": [2.0] * 15 + [80.0]}
    assert diagnose(synthetic_run(metrics=odd)) == []


def test_findings_are_printed_in_full_and_without_control_characters() -> None:
    finding = Finding(
        "not_finite", "serious", "the [red]score\x1b[2J", "it is broken", "", "switch", "fix it", "docs/doctor.md#x"
    )
    text = io.StringIO()
    print_findings("runs/ppo", [finding], Console(file=text, width=100, highlight=False))
    lines = [line.rstrip() for line in text.getvalue().splitlines()]
    assert lines[0] == "runs/ppo: 1 serious"
    assert lines[2] == "serious  not_finite"
    assert lines[3].startswith("  seen   the [red]score")
    assert "\x1b" not in text.getvalue()
    assert lines[4:] == ["  means  it is broken", "  try    fix it", "  docs   docs/doctor.md#x"]
    assert "\x1b" not in one_line(finding)


def test_a_healthy_run_has_no_problems() -> None:
    text = io.StringIO()
    print_findings("runs/ppo", [], Console(file=text))
    assert text.getvalue() == "runs/ppo: no problems found\n"
