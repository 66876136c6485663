"""Every rule finds its problem, and nothing just short of its threshold."""

from __future__ import annotations

import math
import random
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

from kedge_inspect.doctor import Finding, diagnose, examine
from kedge_inspect.doctor.rewards import reward_flat
from kedge_inspect.record import RunRecord
from tests.inspect.doctor.cases import CASES, DAMAGED, NO_SCORES, TAUGHT, TOOLS, Case
from tests.inspect.doctor.edges import EDGES, MIN_UPDATES, Edge
from tests.inspect.doctor.synthetic import ALL_RULES, run_with, synthetic_run, towards


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


ALL_ZERO = {"reward/score_mean": 0.0, "reward/score_std": 0.0, "response/eos_rate": 0.6}


def the_finding(rule: str, **more: Any) -> Finding:
    run = synthetic_run(metrics={**ALL_ZERO, **more}, settings={"rollout.missing_eos_score": None})
    [found] = [finding for finding in diagnose(run) if finding.rule == rule]
    return found


def test_a_constant_score_is_explained_by_the_verdicts_first() -> None:
    verdicts = {"verdict/gsm8k/no_answer_found": 0.61, "verdict/gsm8k/cut_off": 0.39, "verdict/gsm8k/right": None}
    found = the_finding("reward_flat", **verdicts)
    assert found.seen.startswith("all scores are 0: 61% no answer found, 39% cut off at rollout.max_new_tokens=40; ")
    assert found.changes == {"rollout.max_new_tokens": 80}
    assert found.try_ == (
        "say in the prompt in which form gsm8k expects the answer, `#### N`, and give an example; raise "
        "rollout.max_new_tokens from 40 to 80"
    )


def test_the_verdicts_of_a_flat_score_and_of_constant_groups_follow_the_first_clause() -> None:
    verdicts = {"verdict/gsm8k/wrong_value": [0.75] * 16, "verdict/gsm8k/right": [0.25] * 16}
    flat = {"reward/score_mean": [0.25] * 16, "reward/score_std": [0.4] * 16, "group/constant": [0.6] * 16}
    run = synthetic_run(metrics={**flat, **verdicts}, settings={"ppo.advantage": "rloo"})
    seen = {finding.rule: finding.seen for finding in diagnose(run)}
    assert seen["reward_flat"] == (
        "the mean score is 0.250 in update 1 and 0.250 in updates 13 to 16 (verdicts: 75% wrong value, 25% right), "
        "with a standard deviation of 0.400 between responses"
    )
    assert seen["groups_without_spread"] == (
        "the responses of 60% of the prompts all score the same (updates 13 to 16; verdicts: 75% wrong value, 25% "
        "right); at the start it was 60%"
    )


def test_wrong_values_ask_for_easier_prompts_and_judges_do_not_count() -> None:
    verdicts = {"score/watched": 0.0, "verdict/number/wrong_value": 1.0, "verdict/watched/cut_off": 1.0}
    run = synthetic_run(
        metrics={**ALL_ZERO, **verdicts},
        settings={
            "rollout.missing_eos_score": None,
            "reward": [
                {"source": "m:number", "weight": 1.0, "name": None},
                {"source": "m:watched", "weight": 0.0, "name": None},
            ],
        },
    )
    [found] = [finding for finding in diagnose(run) if finding.rule == "reward_flat"]
    assert found.seen.startswith("all scores are 0: 100% wrong value; ")
    assert found.try_.startswith("the prompts are too hard for this model")


@pytest.mark.parametrize(
    ("source", "verdicts", "is_told"),
    [
        ("python:scores", {}, True),
        ("mine.py:brief", {}, True),
        ("runs/reward/model", {}, False),
        ("kedge_tasks.verify:math", {"verdict/math/wrong_value": 1.0}, False),
    ],
)
@pytest.mark.parametrize("updates", [1, 16])
def test_a_function_that_scores_all_the_same_is_told_what_it_gets(source, verdicts, is_told, updates) -> None:
    settings = {"reward": [{"source": source, "weight": 1.0, "name": None}], "rollout.missing_eos_score": None}
    found = diagnose(synthetic_run(updates, {**ALL_ZERO, **verdicts}, settings=settings))
    [flat] = [finding for finding in found if finding.rule == "reward_flat"]
    assert ("completions are texts, also those of conversations" in flat.try_) == is_told
    assert ("the prompts are too hard" in flat.try_) == bool(verdicts)


def test_verdicts_of_several_rewards_have_their_names() -> None:
    found = the_finding("reward_flat", **{"verdict/a/right": 0.1, "verdict/a/odd": 0.9, "verdict/b/right": 1.0})
    assert found.seen.startswith("all scores are 0: a: 90% odd, 10% right; b: 100% right; ")


DISTILLED = {
    **NO_SCORES,
    "objective/kl": towards(60.0, 0.9),
    "reward/total": towards(-60.0, -0.9),
    "policy/entropy": towards(2.0, 0.2),
    "response/length": towards(40.0, 2.0),
    "response/eos_rate": 0.2,
    "value/explained_variance": None,
}
"""A student far from its teacher, whose shorter and less varied responses it takes over."""


def test_a_teacher_alone_is_not_judged_as_a_reward_would_be() -> None:
    taught = synthetic_run(metrics=DISTILLED, settings=TAUGHT)
    assert diagnose(taught) == []
    assert not [
        gap.rule for gap in examine(taught).gaps if gap.rule in ("reward_flat", "score_falling", "beta_too_large")
    ]
    scored = {name: value for name, value in DISTILLED.items() if name not in NO_SCORES}
    without = {finding.rule for finding in diagnose(synthetic_run(metrics=scored))}
    assert without >= {"entropy_collapse", "too_few_eos", "stops_at_once"}


def test_a_reference_far_from_the_start_is_not_a_kl_that_explodes() -> None:
    """As where PPO goes on from an earlier run, with the KL to the fine-tuned model."""
    elsewhere = {"ppo.reference": "runs/sft"}
    for end, expected in ((29.0, False), (60.0, True)):
        run = synthetic_run(metrics={"objective/kl": towards(30.0, end)}, settings=elsewhere)
        assert ("kl_exploding" in [finding.rule for finding in diagnose(run)]) == expected


@pytest.mark.parametrize(
    ("start", "end", "responses", "updates"),
    [(0.8, 0.95, 64, 200), (0.3, 0.6, 16, 200), (0.7, 0.9, 16, 200), (0.3, 0.6, 128, 16), (0.02, 0.2, 64, 200)],
)
def test_a_noisy_rise_is_told_from_a_flat_score(start: float, end: float, responses: int, updates: int) -> None:
    """Of scores that are right or wrong."""
    draw = random.Random(0)
    flagged: dict[float, int] = {}
    for last in (start, end):
        chances = [last + (start - last) * math.exp(-3 * update / (updates - 1)) for update in range(updates)]
        flagged[last] = 0
        for _ in range(40):
            means = [sum(draw.random() < chance for _ in range(responses)) / responses for chance in chances]
            stds = [math.sqrt(mean * (1 - mean)) for mean in means]
            scores = {"reward/score_mean": means, "reward/score_std": stds}
            run = run_with(updates, scores, settings={"rollout.num_prompts": responses})
            flagged[last] += reward_flat.find(run) is not None
    assert flagged[start] >= 36
    assert flagged[end] <= 2


def moved_both_ways(findings: Iterable[Finding]) -> list[str]:
    """The fields that some finding raises and another lowers."""
    verbs = defaultdict[str, set[str]](set)
    for finding in findings:
        for verb, field in re.findall(r"\b(raise|lower) (?:schedules\.)?(\w+\.[\w.]*\w)", finding.try_):
            verbs[field].add(verb)
    return [field for field, found in verbs.items() if len(found) > 1]


def with_both(first: RunRecord, second: RunRecord) -> RunRecord:
    """A run with the faults of two: what differs from a healthy run in the second is added to the first."""
    usual = synthetic_run(len(second.metrics))
    faults = [
        {name: value for name, value in row.items() if value != healthy.get(name)}
        for row, healthy in zip(second.metrics, usual.metrics, strict=True)
    ]
    rows = [{**row, **fault} for row, fault in zip(first.metrics, faults, strict=False)]
    names = {name for name, section in second.config.items() if section != usual.config.get(name)}
    sections = {
        name: {**first.config.get(name, {}), **second.config[name]}
        if isinstance(second.config[name], dict)
        else second.config[name]
        for name in names
    }
    more = {name: getattr(second, name) or getattr(first, name) for name in ("incidents", "critic_checks", "summary")}
    return replace(first, metrics=rows, config={**first.config, **sections}, **more)


def test_no_two_findings_move_a_field_in_opposite_directions() -> None:
    """In runs with two faults each; in some pairs the rules themselves would."""
    draw = random.Random(0)
    pairs = [
        (first.faulty, second.faulty)
        for first, second in combinations(CASES, 2)
        if first.faulty.stage == second.faulty.stage and first.faulty.metrics and second.faulty.metrics
    ]
    for first, second in draw.sample(pairs, 400):
        assert moved_both_ways(diagnose(with_both(first, second))) == []


FLAT = {"reward/score_mean": 1.0}
SMALL_STEPS = {"policy/clip_fraction": 0.01, "policy/approx_kl": 1e-4, "objective/kl": 0.1}
SPIKES = {"policy/grad_norm": [40.0 if update in (6, 9, 12) else 0.35 for update in range(16)]}


@pytest.mark.parametrize(
    ("metrics", "settings", "changed"),
    [
        (SMALL_STEPS, {}, ["ppo.learning_rate", "rollout.num_prompts"]),
        ({**SMALL_STEPS, "policy/approx_kl": 6e-3}, {}, ["rollout.num_prompts"]),
        ({**SMALL_STEPS, "policy/clip_fraction": 0.07}, {}, ["rollout.num_prompts"]),
        (
            {**SMALL_STEPS, "policy/clip_fraction": 0.07},
            {"ppo.ratio": "sequence"},
            ["ppo.learning_rate", "rollout.num_prompts"],
        ),
        ({**SMALL_STEPS, "objective/kl": towards(0.0, 3.0)}, {}, ["rollout.num_prompts"]),
        ({**SMALL_STEPS, **SPIKES}, {}, ["rollout.num_prompts"]),
        ({"policy/approx_kl": 0.8, "policy/clip_fraction": 0.6}, {}, ["rollout.num_prompts"]),
        ({**SMALL_STEPS, "policy/clip_fraction": [0.4, *[0.01] * 15]}, {}, ["rollout.num_prompts"]),
    ],
    ids=["small", "kl", "clipped", "sequences", "moved", "spikes", "too large", "first update"],
)
def test_a_flat_score_raises_the_rate_of_small_steps_alone(
    metrics: dict[str, Any], settings: dict[str, Any], changed: list[str]
) -> None:
    found = {each.rule: each for each in diagnose(synthetic_run(metrics={**FLAT, **metrics}, settings=settings))}
    assert list(found["reward_flat"].changes) == changed
    assert found["reward_flat"].field == changed[0]


GROWING = towards(0.7, 2.0)
WORSE = [0.7] + [0.2, 0.9, 0.9, 3.0] * 10


@pytest.mark.parametrize(
    ("metrics", "verb"),
    [
        ({"loss": [0.69] * 40}, "raise"),
        ({"loss": [1.3] * 40}, "raise"),
        ({"loss": WORSE[:40]}, "lower"),
        ({"loss": GROWING}, "lower"),
        ({"loss": [0.69] * 40, "grad_norm": [40.0 if step % 12 == 9 else 0.35 for step in range(40)]}, "lower"),
        ({"loss": [0.69] * 120, "grad_norm": [0.35] * 60 + [40.0] + [0.35] * 59}, "raise"),
        ({"loss": [0.69] * 40, "eval/loss": [0.5 + 0.01 * step for step in range(40)]}, ""),
    ],
    ids=["slow", "margins", "worse than chance", "rising", "spikes", "single spike", "overfitted"],
)
@pytest.mark.parametrize(
    ("rule", "stage", "section", "figure", "value"),
    [
        ("reward_model_at_chance", "reward", "reward_model", "accuracy", 0.5),
        ("critic_explains_nothing", "critic", "critic", "explained_variance", 0.0),
    ],
)
def test_a_model_that_learned_nothing_gets_the_rate_that_its_training_calls_for(
    metrics: dict[str, Any], verb: str, rule: str, stage: str, section: str, figure: str, value: float
) -> None:
    if stage == "critic" and metrics["loss"] == WORSE[:40]:
        verb = "raise"  # the loss of returns has no unit
    run = run_with(
        len(metrics["loss"]) if isinstance(metrics["loss"], list) else 40,
        {**metrics, figure: 0.5},
        facts={"stage": stage},
        settings={f"{section}.learning_rate": 1e-3, "critic.kind": "separate"},
        summary={figure: {"value": value, "low": value - 0.01, "high": value + 0.01},
                 "measured_on": "held-out prompts"},
    )  # fmt: skip
    found = diagnose(run)
    [finding] = [each for each in found if each.rule == rule]
    assert re.findall(rf"(raise|lower) {section}\.learning_rate", finding.try_) == [verb] * bool(verb)
    assert moved_both_ways(found) == []


STILL = {"policy/clip_fraction": 0.0, "policy/approx_kl": 0.0, "objective/kl": 0.0, "reward/score_mean": 1.0}


@pytest.mark.parametrize(
    ("metrics", "settings"),
    [
        ({"reward/score_mean": 1.0, "reward/score_std": 0.0}, {}),
        ({"group/constant": 1.0}, {"ppo.advantage": "rloo"}),
        ({"group/single": 1.0}, {"ppo.advantage": "grpo"}),
        ({"guard/skipped_steps": 1.0}, {}),
        ({"guard/skipped_steps": [0.0] * 2 + [1.0] * 14}, {"ppo.value_warmup_updates": 2}),
    ],
    ids=["constant", "constant in groups", "groups of one", "skipped", "skipped after the warm-up"],
)
@pytest.mark.parametrize("epochs", [1, 2])
def test_steps_are_not_too_small_where_nothing_could_move_the_policy(
    metrics: dict[str, Any], settings: dict[str, Any], epochs: int
) -> None:
    for more, expected in ({}, True), (metrics, False):
        run = synthetic_run(metrics={**STILL, **more}, settings={**settings, "ppo.num_epochs": epochs})
        found = diagnose(run)
        assert ("steps_too_small" in [each.rule for each in found]) == expected
        assert any("ppo.learning_rate" in each.try_ for each in found) == (expected or "guard/skipped_steps" in metrics)


@pytest.mark.parametrize(
    ("metrics", "more", "other", "advised"),
    [
        ({"guard/skipped_steps": [0.0] * 14 + [1.0] * 2}, {}, "steps_skipped", "see incidents.jsonl for the reasons"),
        ({}, {"incidents": [{**DAMAGED, "token": 1}]}, "not_finite", "inspect the response"),
        ({"policy/grad_norm": [0.35] * 60 + [40.0] + [0.35] * 59}, {}, "gradient_spikes", "watch for more"),
    ],
    ids=["few skipped", "one not finite", "one spike"],
)
def test_small_steps_are_raised_although_few_of_them_were_damaged(
    metrics: dict[str, Any], more: dict[str, Any], other: str, advised: str
) -> None:
    """Rules with evidence as direct as that of small steps, but not more severe, leave the rate to them."""
    updates = len(metrics.get("policy/grad_norm", range(16)))
    run = synthetic_run(updates, {**STILL, **metrics}, settings={"ppo.num_epochs": 1}, **more)
    found = {each.rule: each for each in diagnose(run)}
    assert "raise ppo.learning_rate" in found["steps_too_small"].try_
    assert found[other].try_.startswith(advised)
    assert moved_both_ways(found.values()) == []


@pytest.mark.parametrize(("first", "advised"), [([0.0] * 4, False), ([2.0] * 4, True)])
def test_tools_that_were_called_at_first_are_a_matter_of_the_reward(first: list[float], advised: bool) -> None:
    calls = {**TOOLS, "tools/calls": [*first, *[0.0] * 12]}
    [found] = [each for each in diagnose(synthetic_run(metrics=calls)) if each.rule == "tools_unused"]
    assert ("the reward pays for what the tools find" in found.try_) is advised
    assert {"data.prompts", "model"} & {found.field}


@pytest.mark.parametrize(("overflow", "advised"), [(0.3, True), (0.1, False)])
def test_a_context_that_is_full_can_be_shortened(overflow: float, advised: bool) -> None:
    ended = {"episode/turns": 3.0, "episode/max_tokens": [0.2] * 16, "episode/context_overflow": [overflow] * 16}
    [found] = [each for each in diagnose(synthetic_run(metrics=ended)) if each.rule == "truncated_at_cap"]
    assert ("let the environment shorten it" in found.try_) is advised


@pytest.mark.parametrize("metrics", [{}, {"episode/turns": 3.0}])
def test_runs_without_tools_or_agents_lack_nothing_for_it(metrics: dict[str, Any]) -> None:
    rules = {"tools_fail", "tools_unused", "answers_changed"}
    assert not rules & {gap.rule for gap in examine(synthetic_run(metrics=metrics)).gaps}


def test_every_rule_has_a_case() -> None:
    assert {case.rule for case in CASES} == {rule.name for rule in ALL_RULES}


@pytest.mark.parametrize("updates", [0, 1, 2, 3, 4, 7, 8, 12, 16, 100])
def test_a_healthy_run_has_no_findings(updates: int) -> None:
    assert diagnose(synthetic_run(updates)) == []


@pytest.mark.parametrize(
    ("settings", "fields"),
    [
        ({"ppo.old_logprobs": {"trainer": None}}, ["ppo.old_logprobs.cap", "ppo.importance_mask"]),
        ({"ppo.old_logprobs": "trainer", "ppo.importance_cap": None}, ["ppo.old_logprobs.cap", "ppo.importance_mask"]),
        ({"ppo.old_logprobs": "trainer"}, ["ppo.importance_mask"]),
        ({"ppo.importance_cap": None, "ppo.old_logprobs": "sampler"}, ["ppo.importance_mask"]),
        ({"ppo.old_logprobs": {"trainer": None}, "ppo.importance_mask": "token"}, []),
    ],
)
def test_wide_ratios_call_for_weights_and_then_for_a_mask(settings: dict[str, Any], fields: list[str]) -> None:
    wide = {"policy/sampler_ratio_p01": 0.3, "policy/sampler_ratio_p99": 1.0}
    found = [each for each in diagnose(synthetic_run(metrics=wide, settings=settings)) if "ratios_wide" in each.rule]
    assert [name for each in found for name in each.changes] == fields
