"""The examples' curves: learning rates, equal tokens, and the tables of docs/games.md."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from functools import cache

import pytest

from bench.examples import EXAMPLES, PAGE, RECORD, differences, table, with_table
from bench.study.unit import Outcome, read_outcomes
from kedge.config import config_from_settings
from kedge.config.presets import find_preset

SMALL = replace(EXAMPLES["calculator"], rates=(0.1, 0.2), tokens=100, share=0.5)


def outcome(key: str, scores: list[float]) -> Outcome:
    places = [0.0, 50.0, 100.0]
    return Outcome(key, "calculator", 0, "start", [0, 1, 2], places, places, scores, [None] * 3, 1.0, 1.0)


def outcomes_of(example, scores):
    """Tuning runs in which each arm learns more with one rate, and compared runs with given curves."""
    tuned = {
        unit.key: outcome(unit.key, [0, rate, 0])
        for arm in example.arms
        for rate, unit in example.tuning("calculator", arm).items()
    }
    runs = [unit for arm in example.arms for unit in example.compared("calculator", arm, tuned)]
    return tuned | {unit.key: outcome(unit.key, scores[unit.seed]) for unit in runs}


def test_each_arm_gets_its_best_rate_and_is_read_at_equal_tokens():
    scores = {0: [0.0, 0.2, 0.4], 1: [0.0, 0.3, 0.5], 2: [0.0, 0.4, 0.6]}
    lines = table("calculator", SMALL, outcomes_of(SMALL, scores)).splitlines()
    # Student's t of 2 degrees at 95 % is 4.303: 0.1 / √3 times it is .248.
    assert lines[2].split(" | ") == [
        "| with the tool", "0.00 (0.00–0.00)", "0.15 (0.03–0.27)", "0.30 (0.05–0.55)", "0.40 (0.15–0.65)",
        "0.50 (0.25–0.75)", "0.2 |",
    ]  # fmt: skip
    assert lines[3].startswith("| without it | 0.00")


def test_an_arm_without_all_of_its_runs_is_left_out():
    outcomes = outcomes_of(SMALL, {seed: [0.0, 0.2, 0.4] for seed in range(3)})
    cut_off = SMALL.compared("calculator", "with the tool", outcomes)[2]
    outcomes.pop(cut_off.key)
    assert [line.split(" | ")[0] for line in table("calculator", SMALL, outcomes).splitlines()[2:]] == ["| without it"]
    outcomes.pop(SMALL.tuning("calculator", "without it")[0.1].key)
    assert SMALL.compared("calculator", "without it", outcomes) == []
    assert len(table("calculator", SMALL, outcomes).splitlines()) == 2
    page = "<!-- calculator:begin -->\n<!-- calculator:end -->"
    assert with_table(page, "calculator", {}).splitlines()[1] == "Not run yet."


def test_differences_are_by_seed_and_from_the_best_arm_without_a_critic():
    def runs(spent, *ends):
        """Runs whose score rises from 0 by the end, when they have spent so many FLOPs."""
        return [
            replace(outcome("key", [0, end / 2, end]), flops=[0, spent / 2, spent], explained=[None, seen, seen + 0.2])
            for end, seen in zip(ends, (0.1, 0.3), strict=True)
        ]

    example = replace(EXAMPLES["ranges"], tokens=100)
    free = [replace(run, explained=[None] * 3) for run in (*runs(1e9, 0.4, 0.5), *runs(1e9, 0.5, 0.5))]
    [found] = differences(example, {"PPO, head": runs(2e9, 0.5, 0.7), "RLOO": free[:2], "REINFORCE++": free[2:]})
    _, _, *rows = [line.split(" | ") for line in found.splitlines()]
    # Student's t of 1 degree at 95 % is 12.706: differences of 0 and 0.2 have √2/10/√2 = 0.1 times that around 0.1.
    # After 1e9 FLOPs the head has half of its score: differences of -0.25 and -0.15.
    assert rows == [
        ["| PPO, head", "0.600", "+0.100 (-1.171 to +1.371)", "0.300", "-0.200 (-0.835 to +0.435)", "0.40 |"],
        ["| RLOO", "0.450", "-0.050 (-0.685 to +0.585)", "0.450", "-0.050 (-0.685 to +0.585)", "– |"],
        ["| REINFORCE++", "0.500", "–", "0.500", "–", "– |"],
    ]
    assert not [*differences(example, {"PPO, head": free}), *differences(example, {"RLOO": free})]


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_page_has_the_recorded_curves(name):
    page = PAGE.read_text(encoding="utf-8")
    assert with_table(page, name, read_outcomes(RECORD)) == page, "run python -m bench.examples --page"


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_settings_of_an_example_exist(name):
    example = EXAMPLES[name]
    for arm in example.arms:
        unit = example.unit(name, arm, 1e-3, 0)
        paid = {} if example.reward is None else {"reward": example.reward}
        config = config_from_settings("ppo", {**unit.settings, "model": "m", "data.prompts": "p", **paid})
        assert config.ppo.learning_rate == 1e-3


@pytest.mark.parametrize(("name", "responses"), [("ranges", 256), ("ranges-64", 64)])
def test_all_arms_of_the_ranges_have_as_many_responses_per_update(name, responses):
    example = EXAMPLES[name]
    assert {example.unit(name, arm, 1e-3, 0).responses for arm in example.arms} == {responses}
    assert [arm for arm in example.arms if example.is_critic_free(arm)] == ["REINFORCE++", "SPO", "RLOO", "GRPO"]


@pytest.mark.parametrize(("name", "responses"), [("liar", 128), ("windy", 64), ("maze", 64)])
def test_the_preset_has_as_many_responses_per_update_as_its_rivals(name, responses):
    example = EXAMPLES[name]
    assert {example.unit(name, arm, 1e-3, 0).responses for arm in example.arms} == {responses}
    free = ["REINFORCE++", "RLOO", *(["GRPO", "GiGPO"] if "GRPO" in example.arms else [])]
    assert [arm for arm in example.arms if example.is_critic_free(arm)] == free
    assert example.arms["preset critic"].items() >= find_preset("critic").settings.items()


def test_the_level_of_guesses_among_what_is_left():
    @cache
    def found(left: int, turns: int) -> Fraction:
        """The expected number of the numbers left that are found, each of which is as likely."""
        if left == 0 or turns == 0:
            return Fraction(0)
        return (
            sum((1 + found(at, turns - 1) + found(left - 1 - at, turns - 1) for at in range(left)), Fraction(0)) / left
        )

    assert float(found(15, 4) / 15) == pytest.approx(EXAMPLES["guess"].levels["any left"], abs=5e-4)
