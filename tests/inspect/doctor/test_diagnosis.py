"""Order and texts of findings, and diagnoses with missing metrics."""

from __future__ import annotations

import io
import math
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kedge.config import config_from_settings
from kedge_inspect.doctor import Examination, Finding, diagnose, examine, merge, one_line, print_examinations
from kedge_inspect.doctor.rule import scale
from kedge_inspect.record import RunRecord
from tests.inspect.doctor.cases import CASES, DAMAGED, JUDGED, TAUGHT, Case, approached, dropped, nothing_held_out
from tests.inspect.doctor.edges import EDGES
from tests.inspect.doctor.synthetic import ALL_RULES, BY_NAME, HEALTHY, metrics_read, run_with, synthetic_run, towards

FAST = {
    "policy/clip_fraction": towards(0.5, 0.4),
    "objective/kl": towards(0.0, 60.0),
    "response/eos_rate": [0.8] * 16,
}
"""Steps that are far too large, and their consequences."""


def test_the_most_severe_come_first_and_causes_before_consequences() -> None:
    found = [(finding.severity, finding.rule) for finding in diagnose(synthetic_run(metrics=FAST))]
    assert found == [
        ("serious", "steps_too_large"),
        ("serious", "kl_exploding"),
        ("warning", "truncated_at_cap"),
    ]


def test_rule_names_are_unique() -> None:
    assert len({rule.name for rule in ALL_RULES}) == len(ALL_RULES)


@pytest.mark.parametrize("missing", sorted(HEALTHY))
def test_other_rules_still_apply_if_a_metric_is_missing(missing: str) -> None:
    assert diagnose(synthetic_run(metrics={missing: None})) == []
    for case in CASES:
        if not any(missing in row for row in case.faulty.metrics):
            continue  # the run is the case itself, which has a test of its own
        rows = [{name: value for name, value in row.items() if name != missing} for row in case.faulty.metrics]
        reduced = replace(case.faulty, metrics=rows)
        read = metrics_read(BY_NAME[case.rule], case.faulty)
        if missing not in read and not case.faulty.incidents:
            assert case.rule in [finding.rule for finding in diagnose(reduced)], case.rule


def test_a_run_without_a_configuration_is_diagnosed() -> None:
    found = set[str]()
    for case in CASES:
        for finding in diagnose(RunRecord(case.faulty.folder, metrics=case.faulty.metrics)):
            found.add(finding.rule)
            assert not re.search(r"(raise|lower) \S+ from", finding.try_), "its value is not known"
    assert found >= {"beta_too_small", "dead_critic", "entropy_collapse", "gradient_spikes", "loss_rising"}


def test_null_values_are_left_out() -> None:
    holes = [None if update % 3 else 2.0 for update in range(16)]
    assert diagnose(synthetic_run(metrics={"objective/kl": holes})) == []  # pyright: ignore[reportArgumentType]


def test_a_suggested_value_follows_from_the_present_one() -> None:
    [finding] = diagnose(
        synthetic_run(metrics={"policy/clip_fraction": [0.5] * 16}), advice=lambda field, direction: "why"
    )
    assert finding.try_.startswith("lower ppo.learning_rate from 0.0003 to 4.2e-05 (if too high: why); ")
    assert (finding.field, finding.direction) == ("ppo.learning_rate", "too_high")


WRECKED = {
    "policy/approx_kl": [15.0, 1e-9, 0.0],
    "policy/clip_fraction": [0.4, 0.0, 0.0],
    "policy/entropy": [0.4, 1e-6, 0.0],
    "objective/kl": [0.0, 120.0, 124.0],
    "value/explained_variance": [-3.0, -5e6, -4e9],
    "reward/score_mean": [1.0, -4.0, -4.0],
    "reward/score_std": [0.9, 0.0, 0.0],
}
"""What a learning rate of 50 leaves of a run."""


@pytest.mark.parametrize("updates", [2, 3])
def test_extremes_need_no_history(updates: int) -> None:
    metrics = {name: values[:updates] for name, values in WRECKED.items()}
    findings = diagnose(synthetic_run(updates, metrics=metrics, settings={"ppo.learning_rate": 50.0}))
    assert {each.rule for each in findings if each.severity == "serious"} == {
        "steps_too_large", "kl_exploding", "entropy_collapse", "score_falling", "dead_critic"
    }  # fmt: skip
    assert (findings[0].rule, findings[0].changes) == ("steps_too_large", {"ppo.learning_rate": 1e-3})


@pytest.mark.parametrize(("spread", "serious"), [(0.09, False), (0.11, True)])
def test_a_batch_without_a_success_says_nothing_about_the_critic(spread: float, serious: bool) -> None:
    """Its returns differ by their KL alone: values of a thirtieth of the usual spread have hundreds of times theirs."""
    metrics = {"value/explained_variance": [0.0, -666.0], "value/returns_std": [1.0, spread]}
    found = {each.rule: each.severity for each in diagnose(synthetic_run(2, metrics, state="running"))}
    assert found == ({"dead_critic": "serious", "first_update_too_large": "warning"} if serious else {})


def test_a_healthy_run_of_three_updates_is_no_extreme() -> None:
    assert diagnose(synthetic_run(3)) == []


def test_later_updates_that_move_nothing_do_not_hide_the_one_that_broke_the_policy() -> None:
    moved = {"policy/approx_kl": [0.0, 0.0, 15.0] + [0.0] * 13, "policy/entropy": [0.4] * 3 + [0.0] * 13}
    first, *others = diagnose(synthetic_run(metrics=moved))
    assert (first.rule, first.seen) == (
        "steps_too_large",
        "update 3 moves the policy by 15.0 nats per token and clips 2% of the tokens",
    )
    assert "entropy_collapse" in [each.rule for each in others]


def test_smaller_steps_do_not_cure_a_reward() -> None:
    """A score belongs to a whole response; other values have a token, or are those of a step."""
    score = {**DAMAGED, "what": "judge gave response 2 nan", "row": 2, "token": None, "figures": {}}
    skipped = {"guard/skipped_steps": [0.0] * 15 + [4.0]}
    for incident, changed in ((score, False), ({**score, "token": 1}, True), ({**score, "figures": {"loss": 1}}, True)):
        found = {each.rule: each for each in diagnose(synthetic_run(metrics=skipped, incidents=[incident]))}
        for rule in ("not_finite", "steps_skipped"):
            assert ("ppo.learning_rate" in found[rule].changes) == changed
    assert "the reward that scored it" in found["not_finite"].try_


@pytest.mark.parametrize("updates", [1, 16])
def test_where_no_response_stops_its_score_is_moved_in_vain(updates: int) -> None:
    """All have the score for a missing stop token, whichever it is."""
    none = {"response/eos_rate": 0.0, "reward/score_mean": [-4.25] * updates, "reward/score_std": 0.0}
    found = next(each for each in diagnose(synthetic_run(updates, none)) if each.rule == "too_few_eos")
    assert found.severity == "serious"
    assert found.seen.startswith("all responses were cut off and score -4.25 (update")
    assert found.changes == {"rollout.max_new_tokens": 80}
    assert "missing_eos_score" not in found.try_


def test_a_score_for_a_missing_stop_token_is_moved_where_some_stop() -> None:
    for rates, moved in (([0.0] * 16, False), ([0.1] + [0.0] * 15, True)):
        found = {each.rule: each for each in diagnose(synthetic_run(16, {"response/eos_rate": rates}))}
        assert ("rollout.missing_eos_score" in found["too_few_eos"].try_) == moved


def test_large_steps_come_before_the_empty_responses_that_they_cause() -> None:
    broken = {"policy/approx_kl": [0.1] * 16, "response/length": [20.0] * 4 + [1.0] * 12, "reward/score_mean": 0.0}
    findings = diagnose(synthetic_run(metrics=broken))
    rules = [each.rule for each in findings if each.severity == "serious"]
    assert rules[:2] == ["steps_too_large", "stops_at_once"]
    assert "ppo.learning_rate" in findings[1].changes, "raising the score of unfinished responses would change nothing"


@pytest.mark.parametrize(("first_stops", "field"), [(1.0, ""), (0.5, "rollout.missing_eos_score")])
def test_what_is_advised_against_empty_responses_that_score_best(first_stops: float, field: str) -> None:
    short = {"response/length": [20.0] * 4 + [1.0] * 12, "response/eos_rate": [first_stops] + [1.0] * 15}
    found = {each.rule: each for each in diagnose(synthetic_run(metrics=short))}
    assert found["stops_at_once"].field == field


def test_large_steps_of_a_loss_without_ppos_clip_have_no_clip_fraction_by_epoch() -> None:
    details = [{"update": update, "epochs": [{"approx_kl": 0.3}] * 2} for update in range(1, 17)]
    run = synthetic_run(metrics={"policy/approx_kl": [0.3] * 16}, details=details)
    assert diagnose(run)[0].rule == "steps_too_large"


@pytest.mark.parametrize(("epochs", "first"), [(5, "ppo.num_epochs"), (4, "ppo.learning_rate")])
def test_more_epochs_than_in_the_papers_are_reduced_first(epochs: int, first: str) -> None:
    run = synthetic_run(metrics={"policy/clip_fraction": [0.5] * 16}, settings={"ppo.num_epochs": epochs})
    assert [finding.field for finding in diagnose(run)] == [first]


@pytest.mark.parametrize(("epochs", "twice"), [(0.25, 0.5), (0.75, 2), (2, 4)])
def test_a_share_of_an_epoch_is_doubled_to_what_loads(epochs: float, twice: float) -> None:
    run = synthetic_run(settings={"ppo.num_epochs": epochs})
    assert scale("ppo.num_epochs", 2.0)(run).value == twice
    config_from_settings("ppo", {"model": "m", "prompts": "p", "reward": "r", "ppo.num_epochs": twice})


@pytest.mark.parametrize(("start", "warmup"), [(0, True), (3, False)])
def test_warmup_is_suggested_if_the_first_steps_go_too_far(start: int, warmup: bool) -> None:
    clipped = [0.01] * start + [0.5] * 3 + [0.01] * (13 - start)
    [finding] = diagnose(synthetic_run(metrics={"policy/clip_fraction": clipped}))
    assert ("set ppo.schedule={linear: 0.1}" in finding.try_) == warmup


@pytest.mark.parametrize(
    ("settings", "suggested"),
    [
        ({}, True),
        ({"ppo.clip_range": 0.27}, True),
        ({"ppo.clip_range": 0.3}, False),  # would be narrowed
        ({"ppo.clip_range_high": 0.2}, False),  # chosen
        ({"ppo.clip_range": 3e-4, "ppo.ratio": "sequence"}, False),  # would be a thousand times as wide
        ({"ppo.clip_range": 3e-4, "ppo.ratio": "turn"}, False),
        ({"ppo.policy_loss": "unclipped"}, False),  # would not load
    ],
)
def test_the_upper_clip_is_only_ever_widened(settings: dict[str, Any], suggested: bool) -> None:
    run = synthetic_run(metrics={"policy/entropy": towards(0.4, 0.01)}, settings=settings)
    [found] = [each for each in diagnose(run) if each.rule == "entropy_collapse"]
    assert ("ppo.clip_range_high" in found.changes) is suggested


@pytest.mark.parametrize(
    ("settings", "judged"),
    [
        ({"data.curriculum": None, "data.rest": 0, "data.draw": "evenly"}, True),
        ({"data.curriculum": "difficulty"}, False),
        ({"data.rest": 2}, False),
        ({"data.draw": "by_spread"}, False),
    ],
)
def test_scores_of_other_prompts_are_not_compared(settings: dict[str, Any], judged: bool) -> None:
    """Prompts that get harder by design: the score falls or stays although the policy improves."""
    for rule, score, updates in (
        ("score_falling", towards(0.9, 0.3), 16),
        ("score_falling", [4.0, 0.9], 2),
        ("reward_flat", [0.9] * 16, 16),
    ):
        metrics = {"reward/score_mean": score, "reward/score_std": [1.0] * updates}
        found = examine(synthetic_run(updates, metrics, settings=settings))
        assert (rule in [each.rule for each in found.findings]) is judged
        assert (rule in [gap.rule for gap in found.gaps if gap.reason]) is not judged
    alike = synthetic_run(metrics=ALIKE, settings=settings)
    assert "reward_flat" in [each.rule for each in diagnose(alike)], "of any prompts"


@pytest.mark.parametrize(("successes", "alike"), [(0, True), (1, False)])
def test_a_single_success_is_a_reward_that_tells_responses_apart(successes: int, alike: bool) -> None:
    scores = {"reward/score_mean": [0.0] * 16, "reward/score_std": [0.0] * 16}
    for at in range(7, 7 + successes):
        scores["reward/score_mean"][at] = 1 / 16
        scores["reward/score_std"][at] = 0.24
    found = [each for each in diagnose(synthetic_run(metrics=scores)) if each.rule == "reward_flat"]
    assert [each.severity for each in found] == (["serious"] if alike else ["warning"])


ALIKE = {"reward/score_mean": [0.9] * 16, "reward/score_std": [0.0] * 16}

WARM_UP = {"ppo.value_warmup_updates": 5}


@pytest.mark.parametrize(("start", "settings"), [(0, {}), (5, WARM_UP)])
def test_the_critics_warm_up_changes_no_advice(start: int, settings: dict[str, Any]) -> None:
    """The same steps of the policy, from update 1 or after five updates that train the critic alone."""
    far = {"policy/clip_fraction": [0.0] * start + [0.5] * 3 + [0.01] * 13}
    [large] = diagnose(synthetic_run(start + 16, far, settings=settings))
    assert "set ppo.schedule={linear: 0.1}" in large.try_
    jumped = {"objective/kl": [0.0] * start + [0.0] + [60.0] * 15}
    [found] = diagnose(synthetic_run(start + 16, jumped, settings=settings))
    assert found.rule == "kl_exploding"
    assert list(found.changes.items()) == [("ppo.learning_rate", 3e-5), ("ppo.kl_coef", 0.3)]


@pytest.mark.parametrize(("settings", "rules"), [({}, ["gradient_spikes"]), (WARM_UP, [])])
def test_a_value_heads_gradient_is_not_compared_with_the_policys(settings: dict[str, Any], rules: list[str]) -> None:
    norms = {"policy/grad_norm": [0.03] * 5 + [0.7] * 15}
    assert [each.rule for each in diagnose(synthetic_run(20, norms, settings=settings))] == rules


@pytest.mark.parametrize(("settings", "rules"), [({}, ["teacher_not_approached"]), (WARM_UP, [])])
def test_a_frozen_student_is_not_expected_to_learn(settings: dict[str, Any], rules: list[str]) -> None:
    taught = synthetic_run(metrics=approached(0.95), settings={**TAUGHT, **settings})
    assert [each.rule for each in diagnose(taught) if each.rule == "teacher_not_approached"] == rules


def test_json_has_six_fields() -> None:
    [finding] = diagnose(synthetic_run(metrics={"prompt/distinct": [0.5] * 16}))
    assert list(finding.as_json()) == ["rule", "severity", "seen", "means", "try", "docs"]
    assert finding.as_json()["try"] == finding.try_


def test_four_updates_are_enough_for_what_is_wrong_from_the_start() -> None:
    rows = {"policy/clip_fraction": [0.5] * 4, "policy/approx_kl": [0.3] * 4}
    assert [finding.rule for finding in diagnose(run_with(4, rows))] == ["steps_too_large"]
    shorter = diagnose(run_with(3, {name: figures[:3] for name, figures in rows.items()}))
    assert [finding.rule for finding in shorter] == ["first_update_too_large"]


def test_a_single_outlier_is_no_finding() -> None:
    odd = {"policy/clip_fraction": [0.01] * 8 + [0.9] + [0.01] * 7, "objective/kl": [2.0] * 15 + [80.0]}
    assert diagnose(synthetic_run(metrics=odd)) == []


def test_findings_are_printed_in_full_and_without_control_characters() -> None:
    finding = Finding(
        "not_finite", "serious", "the [red]score\x1b[2J", "it is broken", "", "switch", "fix it", "docs/doctor.md#x"
    )
    text = io.StringIO()
    print_examinations({"runs/ppo": Examination((finding,), 31)}, Console(file=text, width=100, highlight=False))
    lines = [line.rstrip() for line in text.getvalue().splitlines()]
    assert lines[0] == "runs/ppo: 1 serious in 31 checks"
    assert lines[2] == "serious  not_finite"
    assert lines[3].startswith("  seen   the [red]score")
    assert "\x1b" not in text.getvalue()
    assert lines[4:] == ["  means  it is broken", "  try    fix it", "  docs   docs/doctor.md#x"]
    assert "\x1b" not in one_line(finding)


def test_why_a_run_ended_early_is_told() -> None:
    text = io.StringIO()
    ended = examine(replace(JUDGED_RUN, summary={"ended": "the KL is 21"}))
    print_examinations({"runs/ppo": ended}, Console(file=text, width=200))
    assert text.getvalue().splitlines()[1] == "ended early: the KL is 21"
    assert ended.as_json()["ended_early"] == "the KL is 21"


def test_a_healthy_run_has_no_problems() -> None:
    text = io.StringIO()
    print_examinations({"runs/ppo": examine(JUDGED_RUN)}, Console(file=text, width=200))
    assert text.getvalue() == "✓ runs/ppo: nothing wrong in 32 checks\n"


JUDGED_RUN = synthetic_run(
    metrics={"score/gold": towards(0.5, 0.6)}, settings={"reward": JUDGED}, data={"prompts": {"rows": 9, "dropped": {}}}
)
"""A run in which every rule of the stage has what it needs."""


def test_a_short_run_says_what_could_not_be_judged() -> None:
    found = examine(synthetic_run(6, state="running"))
    assert found.verdict == (
        "nothing wrong in 14 checks so far; 17 could not be made: 16 need 8 to 12 updates, and the run has 6; "
        "1 because no judge (a reward of weight 0) measures what the score misses"
    )
    assert {gap.rule for gap in found.gaps} >= {"reward_flat", "dead_critic", "proxy_up_judge_down"}


def test_held_out_prompts_measure_what_the_score_misses_as_a_judge_does() -> None:
    found = examine(synthetic_run(metrics={"eval/score": towards(0.5, 0.6)}))
    assert "proxy_up_judge_down" not in {gap.rule for gap in found.gaps}


def test_a_judge_is_known_whose_first_figures_are_missing() -> None:
    run = synthetic_run(metrics={"score/gold": towards(0.5, 0.6)}, settings={"reward": JUDGED})
    run.metrics[0].pop("score/gold")  # the guard dropped the update
    assert run.judges == ["score/gold"]


def test_what_was_not_measured_could_not_be_judged() -> None:
    [gap] = examine(
        synthetic_run(
            metrics={"score/gold": 0.5, "value/mean": None, "value/clip_fraction": None},
            settings={"reward": JUDGED, "ppo.value_clip_range": None},
        )
    ).gaps[:1]
    assert (gap.rule, gap.reason) == ("value_scale_mismatch", "value/mean was not recorded")
    without_kl = examine(synthetic_run(metrics={"objective/kl": None, "reward/kl": None}))
    assert "2 because the KL was not measured (ppo.measure_kl=true measures it)" in without_kl.verdict


@pytest.mark.parametrize(
    ("run", "verdict"),
    [
        (synthetic_run(0), "nothing was checked: 30 need 1 to 12 updates, and the run has 0; 1 because no judge"),
        (run_with(0, {}, facts={"stage": "rlhf"}), "nothing was checked: there are no rules for this stage"),
        (run_with(0, {}, facts={"stage": "evaluate"}), "nothing was checked: 5 because the run has no result"),
        (
            nothing_held_out(0.6, 0.65),
            "nothing wrong in 2 checks; 3 could not be made: 1 because policy/grad_norm or grad_norm",
        ),
        (nothing_held_out(0.5, 0.6931), "1 serious in 2 checks"),
    ],
)
def test_a_verdict_covers_only_what_was_examined(run: RunRecord, verdict: str) -> None:
    examination = examine(run)
    assert examination.verdict.startswith(verdict)
    assert examination.is_clean == verdict.startswith("nothing wrong")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_a_rule_without_what_it_needs_finds_nothing_or_says_so(case: Case) -> None:
    rule = BY_NAME[case.rule]
    assert rule.concerns(case.faulty)
    assert rule.gap(case.faulty) is None


def test_dropped_rows_name_the_reason_and_the_field() -> None:
    [finding] = diagnose(dropped(188))
    assert finding.seen == (
        "47% of the prompts were dropped (400 rows: 188 prompt longer than data.max_prompt_tokens=512)"
    )
    assert finding.try_.startswith("raise data.max_prompt_tokens from 512 to 1024; set data.truncate=keep_end")
    [finding] = diagnose(dropped(80, "field 'prompt' is missing"))
    assert (finding.field, finding.try_) == ("", "see rejected.jsonl for the rows")


def test_examinations_of_several_runs_are_merged() -> None:
    parts = [examine(synthetic_run(6)), examine(synthetic_run(metrics=FAST))]
    merged = merge(parts)
    assert merged.num_checks == sum(part.num_checks for part in parts)
    assert [finding.severity for finding in merged.findings] == ["serious"] * 2 + ["warning"]
    assert list(merged.as_json()) == ["findings", "checks", "not_judged", "verdict", "ended_early"]


def test_the_suggested_learning_rate_follows_from_the_size_of_the_first_update() -> None:
    early = {"policy/clip_fraction": [0.19], "policy/approx_kl": [0.085], "policy/ratio_max": [27.4]}
    [finding] = diagnose(synthetic_run(1, early, settings={"ppo.learning_rate": 4e-4}))
    assert finding.seen == (
        "update 1 clips 19% of the tokens and moves the policy by 0.0850 nats per token, one token by a factor of 27.4"
    )
    assert "lower ppo.learning_rate from 0.0004 to 0.00014" in finding.try_  # × √(0.01 / 0.085)
    [finding] = diagnose(
        synthetic_run(2, {"value/explained_variance": [0.0, -1.8]}, settings={"ppo.value_head_rate": 30.0})
    )
    assert "lower ppo.value_head_rate from 30 to 10" in finding.try_
    both = {"policy/clip_fraction": [0.19, 0.0], "value/explained_variance": [0.0, -1.8]}
    [finding] = diagnose(synthetic_run(2, both))  # one rate, for policy and critic
    assert finding.changes == {"ppo.learning_rate": 1.1e-4, "ppo.value_warmup_updates": 5}
    assert finding.try_.count("ppo.learning_rate") == 1


def test_the_weight_of_a_separate_critics_loss_is_left_alone() -> None:
    """Adam's steps hardly depend on it."""
    advised = {"shared": set[str](), "separate": set[str]()}
    for run in (*(case.faulty for case in CASES), *(edge.run for edge in EDGES)):
        for critic, rules in advised.items():
            config = {**run.config, "ppo": {**run.config.get("ppo", {}), "critic": critic}}
            findings = diagnose(replace(run, config=config))
            rules |= {finding.rule for finding in findings if "ppo.value_coef" in finding.try_}
    assert advised["shared"] >= {"dead_critic", "value_scale_mismatch"}
    assert advised["separate"] == set()


@pytest.mark.parametrize(("explained", "field"), [(-0.2, "ppo.value_head_rate"), (-0.05, "ppo.critic")])
def test_values_that_are_noise_are_trained_less_and_constant_ones_more(explained: float, field: str) -> None:
    settings = {"ppo.value_head_rate": 30.0, "ppo.value_coef": 0.1}
    for updates in (6, 16):
        run = synthetic_run(updates, {"value/explained_variance": [explained] * updates}, settings=settings)
        assert [finding.field for finding in diagnose(run)] == [field]


@pytest.mark.parametrize(
    ("settings", "explained", "first"),
    [
        ({"ppo.critic": "shared"}, [0.0] * 16, "set ppo.critic=separate"),
        ({"ppo.critic": "separate"}, [0.0] * 16, "set ppo.critic_learning_rate=0.003"),
        (
            {"ppo.critic": "separate", "ppo.critic_learning_rate": 1e-3},
            [0.0] * 16,
            "raise ppo.critic_learning_rate from 0.001 to 0.003",
        ),
        (
            {"ppo.critic": "separate", "ppo.critic_learning_rate": 1e-3},
            [-0.5] * 16,
            "lower ppo.critic_learning_rate from 0.001 to 0.00033",
        ),
        ({"ppo.critic": "readout"}, [0.0] * 16, "set ppo.critic=separate"),
        ({"ppo.critic": "readout"}, [-0.5] * 16, "set ppo.critic={readout: 16}"),
        ({"ppo.critic": {"readout": 3}}, [-0.5] * 16, "set ppo.critic={readout: 6}"),
        ({"ppo.critic": "frozen"}, [0.0] * 16, "set ppo.critic=separate"),
        ({"ppo.critic": "frozen"}, [-0.5] * 16, "set ppo.critic=separate"),
        # Started by the reward model, whose values before the last token mean nothing, and still learning.
        ({"ppo.critic": "separate"}, [-5.0 + 0.3 * step for step in range(16)], "set ppo.critic_learning_rate=0.003"),
    ],
)
def test_a_dead_critic_gets_weights_and_steps_of_its_own(
    settings: dict[str, Any], explained: list[float], first: str
) -> None:
    run = synthetic_run(
        metrics={"value/explained_variance": explained}, settings={"ppo.learning_rate": 3e-4, **settings}
    )
    [finding] = (finding for finding in diagnose(run) if finding.rule == "dead_critic")
    assert finding.try_.startswith(first)


def test_a_thawed_critic_is_told_to_train_at_another_rate() -> None:
    settings = {"ppo.critic": "frozen", "ppo.learning_rate": 3e-4, "ppo.critic_learning_rate": 1e-3}
    for last, first in (1.0, "set ppo.critic=separate"), (0.0, "lower ppo.critic_learning_rate from 0.001"):
        frozen = [1.0] * 5 + [last] * 11
        metrics = {"value/explained_variance": [-0.5] * 16, "value/frozen": frozen}
        run = synthetic_run(metrics=metrics, settings=settings)
        [finding] = (each for each in diagnose(run) if each.rule == "dead_critic")
        assert finding.try_.startswith(first)


@pytest.mark.parametrize("advantage", ["rloo_critic", "reinforce++_critic"])
def test_a_blind_critic_that_adds_to_a_baseline_is_left_alone(advantage: str) -> None:
    """Its weight is near 0, so that its values are no noise in the advantages, no matter how bad they are."""
    metrics = {
        "value/explained_variance": [-600.0] * 16,
        "value/mean": 9.0,
        "advantage/variance_saved": [0.0] * 16,
        "advantage/critic_weight": [0.0] * 16,
    }
    settings = {"ppo.advantage": advantage, "ppo.critic": "shared"}
    [finding] = diagnose(synthetic_run(metrics=metrics, settings=settings))
    assert (finding.rule, finding.severity) == ("idle_critic", "note")
    assert finding.seen.startswith("the critic takes away 0.0% of the advantages' variance, with a weight of 0")
    assert finding.changes == {"ppo.advantage": advantage.removesuffix("_critic"), "ppo.critic": "none"}
    del settings["ppo.advantage"]
    assert "dead_critic" in [each.rule for each in diagnose(synthetic_run(metrics=metrics, settings=settings))]


def test_the_mean_of_a_group_is_no_rival_of_a_critic_that_adds_to_it() -> None:
    case = next(case for case in CASES if case.rule == "critic_worse_than_prompt_mean")
    for advantage, told in ("reinforce++_critic", True), ("rloo_critic", False):
        section = {**case.faulty.config.get("ppo", {}), "advantage": advantage}
        run = replace(case.faulty, config={**case.faulty.config, "ppo": section})
        assert (case.rule in [each.rule for each in diagnose(run)]) is told


@pytest.mark.parametrize("critic", ["readout", "frozen"])
def test_a_critic_without_a_loss_has_no_loss_to_judge(critic: str) -> None:
    """Neither a clip nor a unit."""
    settings = {"ppo.critic": critic, "ppo.value_unit": "score", "ppo.value_clip_range": 0.2}
    run = synthetic_run(
        metrics={"value/clip_fraction": [0.9] * 16, "value/returns_std": [30.0] * 16}, settings=settings
    )
    rules = {finding.rule for finding in diagnose(run)}
    assert not rules & {"value_clip_binding", "value_scale_mismatch"}


@pytest.mark.parametrize(
    ("settings", "explained", "suggested"),
    [
        ({"ppo.gae_lambda": 0.95}, 0.0, True),
        ({"ppo.gae_lambda": 0.95, "ppo.advantage": "td"}, 0.0, False),  # which has no λ
        ({"ppo.gae_lambda": 1.0}, 0.0, False),
        ({"ppo.gae_lambda": "length_adaptive"}, 0.0, False),
        ({"ppo.gae_lambda": 0.95}, 0.4, False),  # only the mean of its values is off
    ],
)
def test_lambda_is_raised_where_the_critic_explains_nothing(
    settings: dict[str, Any], explained: float, suggested: bool
) -> None:
    metrics = {"value/explained_variance": [explained] * 16, "value/mean": [0.0] * 16, "value/returns_mean": [2.0] * 16}
    run = synthetic_run(metrics=metrics, settings=settings)
    [finding] = (finding for finding in diagnose(run) if finding.rule == "dead_critic")
    assert ("ppo.gae_lambda" in finding.try_) is suggested


@pytest.mark.parametrize(
    ("field", "factor", "settings", "value"),
    [
        ("rollout.num_prompts", 1.25, {"rollout.num_prompts": 193, "ppo.num_minibatches": 4}, 240),
        ("rollout.num_prompts", 0.5, {"rollout.num_prompts": 6, "ppo.num_minibatches": 4}, 4),
        (
            "rollout.num_responses",
            2.0,
            {"rollout.num_prompts": 6, "rollout.num_responses": 3, "ppo.num_minibatches": 9},
            6,
        ),
        ("data.eval_fraction", 3.0, {"data.eval_fraction": 0.3}, 0.5),
    ],
)
def test_an_advised_value_loads(field: str, factor: float, settings: dict[str, Any], value: float) -> None:
    assert scale(field, factor)(record_of(settings)).value == value


def test_all_that_is_advised_loads() -> None:
    sizes = ("rollout.num_prompts", "rollout.num_responses", "ppo.num_minibatches")
    kept = (*sizes, "ppo.advantage", "ppo.kl_in", "ppo.value_loss")
    for case in CASES:
        for finding in diagnose(case.faulty):
            present = {name: case.faulty.setting(name) for name in kept}
            settings = {name: value for name, value in present.items() if value is not None}
            config_from_settings(case.faulty.stage, {**settings, **finding.changes})


DRIFTING = {
    "objective/kl": towards(0.0, 8.0),
    "objective/kl_coef": [0.001] * 16,
    "reward/score_mean": [1.0] * 4 + [2.0] * 12,
    "reward/score_std": [0.5] * 16,
}
UNEXPLAINED = {"value/explained_variance": [0.0] * 16}
TOO_WIDE = {"value/std": [5.0] * 16, "value/returns_std": [1.0] * 16, "value/explained_variance": [-24.0] * 16}
NARROWING = {**TOO_WIDE, "value/explained_variance": towards(-60.0, -24.0)}
SURE = {"policy/entropy": [0.02] * 16, "reward/score_mean": [1.0] * 16}
RANDOM = {"policy/entropy": [0.2] * 4 + [0.5] * 12}
GROUPS = {"ppo.advantage": "rloo", "rollout.num_responses": 4, "ppo.kl_in": "loss"}
BY_SPREAD = {"ppo.advantage": "grpo", "ppo.kl_in": "reward", "ppo.kl_coef": 0.0}
"""As the presets dapo, gspo and cispo: without a KL, and so in no place that it needs."""


@pytest.mark.parametrize(
    ("rule", "metrics", "settings", "changes"),
    [
        ("value_scale_mismatch", TOO_WIDE, {}, {"ppo.value_head_rate": 3.3, "ppo.value_warmup_updates": 5}),
        (
            "value_scale_mismatch",
            TOO_WIDE,
            {"ppo.critic": "separate", "ppo.critic_init": "reward", "ppo.value_warmup_updates": 3},
            {"ppo.critic_init": "policy", "ppo.learning_rate": 3.3e-6},
        ),
        (
            "value_scale_mismatch",
            NARROWING,
            {"ppo.critic": "separate", "ppo.critic_init": "policy", "ppo.value_warmup_updates": 3},
            {"ppo.critic_learning_rate": 1e-4},
        ),
        (
            "dead_critic",
            UNEXPLAINED,
            {"ppo.critic": "detached", "ppo.value_warmup_updates": 3},
            {"ppo.value_coef": 0.3, "ppo.value_head_rate": 30.0},
        ),
        (
            "dead_critic",
            UNEXPLAINED,
            {"ppo.critic": "separate", "ppo.critic_learning_rate": 1e-4, "ppo.num_updates": 5},
            {"ppo.critic_learning_rate": 3e-4},
        ),
        # Five nats cost a quarter of the score's gain of 1
        ("beta_too_small", DRIFTING, {"ppo.kl_coef": 0.001}, {"ppo.kl_coef": 0.05}),
        ("beta_too_small", DRIFTING, {"ppo.kl_controller": "ziegler"}, {"ppo.kl_controller.target": 2.0}),
        ("beta_too_small", {**DRIFTING, "objective/kl_coef": 0.0}, {**GROUPS, **BY_SPREAD},
         {"ppo.kl_coef": 0.05, "ppo.kl_in": "loss"}),
        ("hacking_by_repetition", {"response/repetition": towards(0.02, 0.3)}, {**GROUPS, **BY_SPREAD},
         {"ppo.kl_in": "loss"}),
        ("kl_exploding", {"objective/kl": towards(0.0, 30.0)}, {**GROUPS, **BY_SPREAD},
         {"ppo.learning_rate": 3.3e-6, "ppo.kl_in": "loss"}),
        (
            "kl_exploding",  # at a target of 30 nats, which the controller holds, and three times as far as 6
            {"objective/kl": towards(0.0, 30.0)},
            {"ppo.kl_controller": {"ziegler": {"target": 30.0}}},
            {"ppo.learning_rate": 3.3e-6, "ppo.kl_controller.target": 10.0},
        ),
        (
            "kl_exploding",
            {"objective/kl": towards(0.0, 30.0)},
            {"ppo.kl_controller": {"ziegler": {"target": 6.0}}},
            {"ppo.learning_rate": 3.3e-6, "ppo.kl_coef": 0.15},
        ),
        ("entropy_rising", RANDOM, {"ppo.entropy_target": 0.5}, {"ppo.entropy_target": 0.2}),
        ("entropy_rising", RANDOM, {"ppo.entropy_target": 0.1}, {"ppo.learning_rate": 3.3e-6}),
        (
            "entropy_collapse",
            {"policy/entropy": [0.4] * 4 + [0.01] * 12},
            {"ppo.entropy_target": 0.4},
            {"ppo.learning_rate": 3.3e-6, "ppo.clip_range_high": 0.28},
        ),
        ("no_exploration", SURE, {"ppo.entropy_coef": 0.01}, {"rollout.temperature": 1.3, "ppo.entropy_coef": 0.03}),
        ("no_exploration", SURE, {"ppo.entropy_target": 0.5, "ppo.entropy_coef": 0.01}, {"rollout.temperature": 1.3}),
        ("groups_without_spread", {"group/constant": [0.7] * 16}, GROUPS,
         {"ppo.constant_groups": "resample", "rollout.num_responses": 8}),
        ("groups_without_spread", {"group/constant": [0.7] * 16}, {**GROUPS, "rollout.max_staleness": 1},
         {"rollout.num_responses": 8}),
    ],
)  # fmt: skip
def test_what_is_advised_changes_something_and_loads(
    rule: str, metrics: dict[str, Any], settings: dict[str, Any], changes: dict[str, Any]
) -> None:
    """Of runs with the whole configuration that these settings give."""
    config = config_from_settings("ppo", settings)
    run = replace(synthetic_run(metrics=metrics), config=config.model_dump(mode="json"))
    [found] = [each for each in diagnose(run) if each.rule == rule]
    assert found.changes == changes
    config_from_settings("ppo", {**settings, **found.changes})


@pytest.mark.parametrize(
    ("rule", "metrics", "field", "points", "changed", "text"),
    [
        (  # 7 % are to be clipped instead of 50 %
            "steps_too_large", {"policy/clip_fraction": [0.5] * 16}, "ppo.learning_rate",
            {1: 1e-3, 100: 1e-4}, {1: 1.4e-4, 100: 1.4e-5},
            "lower schedules.ppo.learning_rate from {1: 0.001, 100: 0.0001} to {1: 0.00014, 100: 1.4e-05}",
        ),
        (
            "beta_too_small", DRIFTING, "ppo.kl_coef",
            {1: 0.001}, {1: 0.05},
            "set schedules.ppo.kl_coef={1: 0.05}",
        ),
        (
            "dead_critic", UNEXPLAINED, "ppo.gae_lambda",
            {1: 1.0, 16: 0.9}, {1: 1.0},
            "set schedules.ppo.gae_lambda={1: 1} as long as the critic explains so little",
        ),
        (  # a bonus that was there at first
            "entropy_rising", {"policy/entropy": towards(0.2, 0.5), "objective/entropy_coef": [0.1] * 8 + [0.0] * 8},
            "ppo.entropy_coef", {1: 0.1, 8: 0.1, 9: 0}, {1: 0.01, 8: 0.01, 9: 0},
            "lower schedules.ppo.entropy_coef from {1: 0.1, 8: 0.1, 9: 0} to {1: 0.01, 8: 0.01, 9: 0}",
        ),
        (
            "no_exploration", {**SURE, "objective/entropy_coef": [0.02, *[0.01] * 15]},
            "ppo.entropy_coef", {1: 0.02, 16: 0.01}, {1: 0.06, 16: 0.03},
            "raise schedules.ppo.entropy_coef from {1: 0.02, 16: 0.01} to {1: 0.06, 16: 0.03}",
        ),
        (
            "steps_too_small", {"policy/clip_fraction": 0.0, "policy/approx_kl": 0.0, "objective/kl": 0.0,
                                "reward/score_mean": 1.0}, "ppo.num_epochs",
            {1: 2, 16: 4}, {},
            "raise ppo.num_epochs (now 4)",
        ),
    ],
)  # fmt: skip
def test_a_schedule_is_changed_where_a_field_has_one(
    rule: str,
    metrics: dict[str, Any],
    field: str,
    points: dict[int, float],
    changed: dict[int, float],
    text: str,
) -> None:
    settings = {"schedules": {field: points}}
    config = config_from_settings("ppo", settings)
    run = synthetic_run(metrics={**metrics, f"schedule/{field}": [points[max(points)]] * 16})
    run = replace(run, config=config.model_dump(mode="json"))
    [found] = [each for each in diagnose(run, advice=lambda of, way: "why" * (of == field)) if each.rule == rule]
    assert text in found.try_
    assert "why" in found.try_ or rule == "dead_critic"
    assert field not in found.changes
    loaded = config_from_settings("ppo", {**settings, **found.changes})
    assert loaded.schedules == {field: changed or points}


def test_the_entropy_at_a_scheduled_temperature_is_not_judged() -> None:
    scheduled = {"schedules": {"rollout.temperature": {"1": 1.2, "16": 0.6}}}
    for rule, entropy, updates in (
        ("entropy_collapse", towards(2.0, 0.1), 16),
        ("entropy_collapse", [2.0, 0.001], 2),
        ("entropy_rising", towards(0.2, 0.5), 16),
    ):
        assert rule in [each.rule for each in diagnose(synthetic_run(updates, {"policy/entropy": entropy}))]
        found = examine(synthetic_run(updates, {"policy/entropy": entropy}, settings=scheduled))
        assert rule not in [each.rule for each in found.findings]
        assert rule in [gap.rule for gap in found.gaps if gap.reason]


def test_without_a_gain_no_size_of_beta_is_advised() -> None:
    run = synthetic_run(metrics={**DRIFTING, **ALIKE, "objective/kl_coef": 0.0}, settings={"ppo.kl_coef": 0.0})
    [found] = [each for each in diagnose(run) if each.rule == "beta_too_small"]
    assert (found.try_, found.changes) == ("raise ppo.kl_coef (now 0)", {})


def record_of(settings: dict[str, Any]) -> RunRecord:
    """A run with these settings."""
    config: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        section, _, key = name.partition(".")
        config.setdefault(section, {})[key] = value
    return replace(synthetic_run(), config=config)


def found_in(metrics: dict[str, Any], updates: int = 20, **settings: Any) -> set[str]:
    return {each.rule for each in diagnose(synthetic_run(updates, metrics=metrics, settings=settings))}


def test_an_entropy_that_the_first_steps_destroy_is_not_one_that_was_low_from_the_start() -> None:
    flat = {"reward/score_mean": 1.0, "reward/score_std": 1.0}
    wrecked = {"policy/entropy": [0.4, 1e-4, 1e-5, *[1e-5] * 17], **flat}
    assert {"entropy_collapse", "no_exploration"} & found_in(wrecked) == {"entropy_collapse"}
    low = {"policy/entropy": 1e-4, **flat}
    assert {"entropy_collapse", "no_exploration"} & found_in(low) == {"no_exploration"}


@pytest.mark.parametrize(("constant", "expected"), [(0.4, False), (0.6, True)])
def test_few_likely_responses_are_enough_while_most_groups_differ(constant: float, expected: bool) -> None:
    groups = {"ppo.advantage": "grpo", "ppo.kl_in": "loss", "rollout.num_responses": 8}
    metrics = {"policy/entropy": towards(0.15, 0.035), "group/constant": constant}
    found = {each.rule for each in diagnose(synthetic_run(20, metrics=metrics, settings=groups))}
    assert ("entropy_collapse" in found) == expected


def test_steps_are_too_large_by_either_metric() -> None:
    assert "steps_too_large" in found_in({"policy/clip_fraction": None, "policy/approx_kl": 0.3})
    assert "steps_too_large" in found_in({"policy/clip_fraction": 0.4, "policy/approx_kl": None})
    assert "steps_too_large" not in found_in({"policy/clip_fraction": None, "policy/approx_kl": None})


@pytest.mark.parametrize(("peak", "expected"), [(3.9, False), (4.1, True)])
def test_a_loss_that_doubles_has_diverged_even_if_it_falls_again(peak: float, expected: bool) -> None:
    loss = [2.0, 2.0, peak, peak, peak, *[1.8] * 25]
    run = run_with(30, {"loss": loss}, facts={"stage": "sft"})
    assert ("loss_rising" in {each.rule for each in diagnose(run)}) == expected


@pytest.mark.parametrize(("end", "expected"), [(0.1, False), (0.69, True)])
def test_gradients_may_grow_while_a_loss_falls(end: float, expected: bool) -> None:
    norms = lambda done: 0.05 * 100**done  # noqa: E731
    run = run_with(40, {"loss": towards(0.69, end), "grad_norm": norms}, facts={"stage": "reward"})
    assert ("gradient_spikes" in {each.rule for each in diagnose(run)}) == expected


def test_a_kl_that_is_never_finite_is_as_one_that_was_not_measured() -> None:
    """In memory; a run's folder has null there."""
    single = {"ppo.num_epochs": 1, "ppo.num_minibatches": 1}
    for kl in (math.nan, None):
        run = synthetic_run(metrics={"objective/kl": kl}, settings=single)
        reasons = {gap.rule: gap.reason for gap in examine(run).gaps}
        assert reasons["steps_too_small"] == "the KL was not measured (ppo.measure_kl=true measures it)"


def test_an_extreme_update_without_a_clip_fraction() -> None:
    run = synthetic_run(3, {"policy/approx_kl": [0.01, 2.0, 0.01], "policy/clip_fraction": [0.1, None, 0.1]})
    [found] = [each for each in diagnose(run) if each.rule == "steps_too_large"]
    assert found.seen == "update 2 moves the policy by 2.00 nats per token"


def test_a_policy_that_stays_as_far_from_another_reference_does_not_explode() -> None:
    draw = random.Random(0)
    for _ in range(20):
        kl = [30 + draw.gauss(0, 1) for _ in range(16)]
        run = synthetic_run(metrics={"objective/kl": kl}, settings={"ppo.reference": "runs/sft"})
        assert "kl_exploding" not in [each.rule for each in diagnose(run)]


@pytest.mark.parametrize(("steps", "severity"), [(1, "warning"), (3, "warning"), (4, "note")])
def test_the_first_update_after_the_critics_warm_up_is_told_as_early_as_any(steps: int, severity: str) -> None:
    settings = {"ppo.value_warmup_updates": 5}
    columns = {"policy/clip_fraction": [0.0] * 5 + [0.5, *[0.01] * (steps - 1)],
               "policy/approx_kl": [0.0] * 5 + [0.01] * steps}  # fmt: skip
    [found] = diagnose(synthetic_run(5 + steps, columns, settings=settings))
    assert (found.rule, found.severity) == ("first_update_too_large", severity)


@pytest.mark.parametrize(
    ("rates", "score", "advised"),
    [
        ({"subtract": 1.0}, [0.9] * 4 + [0.3] * 12, {"subtract": 2.0}),
        ({"subtract": 0.0}, [0.9] * 4 + [0.3] * 12, -1),
        ("mask", [0.9] * 4 + [0.3] * 12, -1),
        ({"subtract": 1.0}, [0.5] + [1.0] * 15, {"subtract": 0.5}),
    ],
)
def test_the_score_of_a_missing_stop_token_is_moved_the_right_way(rates: Any, score: list[float], advised: Any) -> None:
    short = {"response/length": [20.0] * 4 + [1.0] * 12} if score[-1] == 1 else {}
    run = synthetic_run(metrics={"response/eos_rate": score, **short}, settings={"rollout.missing_eos_score": rates})
    told = {each.rule: each.changes["rollout.missing_eos_score"] for each in diagnose(run)
            if "rollout.missing_eos_score" in each.changes}  # fmt: skip
    assert set(told) == ({"stops_at_once"} if short else {"too_few_eos", "hacking_by_not_stopping"})
    assert all(value == advised for value in told.values())


@pytest.mark.parametrize(
    ("settings", "left_out"),
    [
        ({}, []),
        ({"ppo.critic": "separate", "ppo.critic_learning_rate": 1e-4, "ppo.value_gae_lambda": 1.0,
          "ppo.num_critic_epochs": 2, "ppo.value_warmup_updates": 3, "ppo.critic_check": 5},
         ["critic_learning_rate", "value_warmup_updates", "num_critic_epochs", "value_gae_lambda", "critic_check"]),
    ],
)  # fmt: skip
def test_a_run_without_its_idle_critic_loads(settings: dict[str, Any], left_out: list[str]) -> None:
    settings = {"ppo.advantage": "reinforce++_critic", **settings}
    config = config_from_settings("ppo", settings).model_dump(mode="json")
    run = replace(synthetic_run(metrics={"advantage/variance_saved": [0.0] * 16}), config=config)
    [found] = [each for each in diagnose(run) if each.rule == "idle_critic"]
    assert re.findall(r"leave out ppo\.(\w+)", found.try_) == left_out
    kept = {name: value for name, value in settings.items() if name.removeprefix("ppo.") not in left_out}
    config_from_settings("ppo", {**kept, **found.changes})


@pytest.mark.parametrize(("init", "advised"), [("policy", True), ("runs/critic", False)])
@pytest.mark.parametrize("critic", ["shared", "readout"])
def test_a_saved_value_head_is_not_told_to_become_a_model(critic: str, init: str, advised: bool) -> None:
    settings = {"ppo.critic": critic, "ppo.critic_init": init}
    run = synthetic_run(metrics={"value/explained_variance": [0.0] * 16}, settings=settings)
    [found] = [each for each in diagnose(run) if each.rule == "dead_critic"]
    assert ("ppo.critic=separate" in found.try_) == advised


def test_an_environment_that_fails_is_not_retried_as_a_function_is() -> None:
    lost = {"reward/environment_given_up": [0.0] * 8 + [5.0] * 8, "episode/turns": 2.0}
    [found] = [each for each in diagnose(synthetic_run(metrics=lost)) if each.rule == "reward_function_failing"]
    assert found.try_ == "see reward.log for the environment's output and exceptions"
    both = {**lost, "reward/mine_failures": [0.0] * 8 + [1.0] * 8}
    [found] = [each for each in diagnose(synthetic_run(metrics=both)) if each.rule == "reward_function_failing"]
    assert "reward_functions.retries" in found.try_


def test_scores_of_one_response_have_no_spread_that_could_fall() -> None:
    alone = synthetic_run(metrics={"reward/score_std": [0.0] * 16}, settings={"rollout.num_prompts": 1})
    assert "reward_saturated" not in [each.rule for each in diagnose(alone)]


def test_no_function_is_blamed_where_the_environment_pays() -> None:
    paid = {**ALIKE, "reward/score_mean": 0.0, "episode/turns": 2.0}
    [found] = [each for each in diagnose(synthetic_run(metrics=paid, settings={"reward": []})) if "flat" in each.rule]
    assert "completions are texts" not in found.try_


@pytest.mark.parametrize("spread", [0.15, 0.3, 0.45])
def test_the_loss_of_small_batches_does_not_diverge(spread: float) -> None:
    draw = random.Random(1)
    for _ in range(30):
        losses = [math.exp(draw.gauss(0, spread)) for _ in range(300)]
        run = run_with(300, {"loss": losses}, facts={"stage": "sft"})
        assert "loss_rising" not in [each.rule for each in diagnose(run)]
        for step in range(100, 110):
            losses[step] = 10.0
        diverged = run_with(300, {"loss": losses}, facts={"stage": "sft"})
        assert "loss_rising" in [each.rule for each in diagnose(diverged)]


@pytest.mark.parametrize(
    ("marks", "section"),
    [({"accuracy": 0.5}, "reward_model"), ({"explained_variance": 0.1}, "critic"), ({}, "sft")],
)
def test_a_run_whose_stage_is_not_known_is_advised_by_its_metrics(marks: dict[str, float], section: str) -> None:
    rows = [{"update": update, "loss": 1 + 0.2 * update, "grad_norm": 1.0, **marks} for update in range(1, 40)]
    run = RunRecord(Path("run"), {}, {section: {"learning_rate": 1e-5}}, rows)
    [found] = [each for each in examine(run).findings if each.rule == "loss_rising"]
    assert f"lower {section}.learning_rate from 1e-05" in found.try_
