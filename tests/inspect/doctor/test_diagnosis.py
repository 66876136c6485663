"""What a diagnosis is made of: its order, its words, and what it does where figures are missing."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from kedge.inspect.doctor import RULES, Finding, diagnose, one_line, print_findings
from kedge.inspect.record import RunRecord
from tests.inspect.doctor.cases import CASES
from tests.inspect.doctor.synthetic import WELL, bare, made_up, towards

FAST = {
    "policy/clip_fraction": towards(0.5, 0.4),
    "objective/kl": towards(0.0, 60.0),
    "response/eos_rate": [0.8] * 16,
    "policy/staleness": 1.0,
}
"""Steps that are far too large, and what comes of it."""


def test_the_gravest_come_first_and_causes_before_their_consequences() -> None:
    found = [(finding.severity, finding.rule) for finding in diagnose(made_up(figures=FAST))]
    assert found == [
        ("serious", "steps_too_large"),
        ("serious", "kl_exploding"),
        ("warning", "stale_rollouts"),
        ("warning", "truncated_at_cap"),
    ]


def test_every_rule_has_a_name_of_its_own() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)


@pytest.mark.parametrize("missing", sorted(WELL))
def test_a_run_without_a_metric_is_judged_by_the_others(missing: str) -> None:
    assert diagnose(made_up(figures={missing: None})) == []
    for case in CASES:
        rows = [{name: figure for name, figure in row.items() if name != missing} for row in case.sick.metrics]
        reduced = RunRecord(case.sick.folder, case.sick.facts, case.sick.config, rows, summary=case.sick.summary)
        read = next(rule.reads for rule in RULES if rule.name == case.rule)
        if missing not in read and not case.sick.incidents:
            assert case.rule in [finding.rule for finding in diagnose(reduced)], case.rule


def test_a_metric_that_a_rule_needs_is_one_that_it_says_it_reads() -> None:
    for case in CASES:
        reads = {name for rule in RULES if rule.name == case.rule for name in rule.reads}
        rows = [
            {name: figure for name, figure in row.items() if name == "update" or _is_read(name, reads)}
            for row in case.sick.metrics
        ]
        reduced = RunRecord(
            case.sick.folder, case.sick.facts, case.sick.config, rows,
            incidents=case.sick.incidents, summary=case.sick.summary,
        )  # fmt: skip
        assert case.rule in [finding.rule for finding in diagnose(reduced)], case.rule


def _is_read(name: str, reads: set[str]) -> bool:
    head, _, tail = name.partition("/")
    return name in reads or f"{head}/NAME" in reads or f"{head}/NAME_{tail.partition('_')[2]}" in reads


def test_a_run_without_a_configuration_is_judged_all_the_same() -> None:
    for case in CASES:
        diagnose(RunRecord(case.sick.folder, metrics=case.sick.metrics))


def test_null_figures_are_left_out() -> None:
    holes = [None if update % 3 else 2.0 for update in range(16)]
    assert diagnose(made_up(figures={"objective/kl": holes})) == []  # pyright: ignore[reportArgumentType]


def test_a_value_to_try_follows_from_the_present_one() -> None:
    [finding] = diagnose(made_up(figures={"policy/clip_fraction": [0.5] * 16}), advice=lambda knob, direction: "why")
    assert finding.try_.startswith("ppo.learning_rate=0.0001 instead of 0.0003 (too high: why); ")
    assert (finding.knob, finding.direction) == ("ppo.learning_rate", "too_high")


@pytest.mark.parametrize(("epochs", "first"), [(5, "ppo.num_epochs"), (4, "ppo.learning_rate")])
def test_more_epochs_than_the_papers_take_are_the_first_to_go(epochs: int, first: str) -> None:
    run = made_up(figures={"policy/clip_fraction": [0.5] * 16}, settings={"ppo.num_epochs": epochs})
    assert [finding.knob for finding in diagnose(run)] == [first]


@pytest.mark.parametrize(("begins", "warm_up"), [(0, True), (3, False)])
def test_first_steps_that_go_too_far_call_for_a_warm_up(begins: int, warm_up: bool) -> None:
    clipped = [0.01] * begins + [0.5] * 3 + [0.01] * (13 - begins)
    [finding] = diagnose(made_up(figures={"policy/clip_fraction": clipped}))
    assert ("ppo.warmup_fraction=0.1" in finding.try_) == warm_up


def test_json_has_six_fields() -> None:
    [finding] = diagnose(made_up(figures={"prompt/distinct": [0.5] * 16}))
    assert list(finding.as_json()) == ["rule", "severity", "seen", "means", "try", "docs"]
    assert finding.as_json()["try"] == finding.try_


def test_few_updates_are_told_of_what_is_wrong_from_the_start() -> None:
    rows = {"policy/clip_fraction": [0.5] * 4, "policy/approx_kl": [0.3] * 4}
    assert [finding.rule for finding in diagnose(bare(4, rows))] == ["steps_too_large"]
    assert diagnose(bare(3, {name: figures[:3] for name, figures in rows.items()})) == []


def test_one_odd_update_is_no_finding() -> None:
    odd = {"policy/clip_fraction": [0.01] * 8 + [0.9] + [0.01] * 7, "objective/kl": [2.0] * 15 + [80.0]}
    assert diagnose(made_up(figures=odd)) == []


def test_findings_are_printed_with_all_that_is_known_and_harmlessly() -> None:
    finding = Finding(
        "not_finite", "serious", "the [red]score\x1b[2J", "it is broken", "", "switch", "mend it", "docs/doctor.md#x"
    )
    text = io.StringIO()
    print_findings("runs/ppo", [finding], Console(file=text, width=100, highlight=False))
    lines = [line.rstrip() for line in text.getvalue().splitlines()]
    assert lines[0] == "runs/ppo: 1 serious"
    assert lines[2] == "serious  not_finite"
    assert lines[3].startswith("  seen   the [red]score")
    assert "\x1b" not in text.getvalue()
    assert lines[4:] == ["  means  it is broken", "  try    mend it", "  read   docs/doctor.md#x"]
    assert "\x1b" not in one_line(finding)


def test_a_run_that_is_well_is_said_to_be() -> None:
    text = io.StringIO()
    print_findings("runs/ppo", [], Console(file=text))
    assert text.getvalue() == "runs/ppo: nothing that calls for an answer\n"
