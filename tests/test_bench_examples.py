"""The examples' curves: learning rates, equal tokens, and the tables of docs/episodes.md."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from functools import cache

import pytest

from bench.examples import EXAMPLES, PAGE, RECORD, SEEDS, compared, table, with_table
from bench.study.unit import Outcome, read_outcomes
from kedge.config import config_from_settings

SMALL = replace(EXAMPLES["calculator"], rates=(0.1, 0.2), tokens=100, share=0.5)


def outcome(key: str, scores: list[float]) -> Outcome:
    places = [0.0, 50.0, 100.0]
    return Outcome(key, "calculator", 0, "start", [0, 1, 2], places, places, scores, [None] * 3, 1.0, 1.0)


def outcomes_of(example, scores):
    """Tuning runs in which each arm learns more with one rate, and compared runs with given curves."""
    tuned = {unit.key: outcome(unit.key, [0, rate, 0]) for (_, rate), unit in example.tuning("calculator").items()}
    runs = compared("calculator", example, tuned)
    return tuned | {unit.key: outcome(unit.key, scores[seed]) for (_, seed), unit in runs.items()}


def test_each_arm_gets_its_best_rate_and_is_read_at_equal_tokens():
    scores = {0: [0.0, 0.2, 0.4], 1: [0.0, 0.3, 0.5], 2: [0.0, 0.4, 0.6]}
    lines = table("calculator", SMALL, outcomes_of(SMALL, scores)).splitlines()
    # Student's t of 2 degrees at 95 % is 4.303: 0.1 / √3 times it is .248.
    assert lines[2].split(" | ") == [
        "| with the tool", "0.00 (0.00–0.00)", "0.15 (0.03–0.27)", "0.30 (0.05–0.55)", "0.40 (0.15–0.65)",
        "0.50 (0.25–0.75)", "0.2 |",
    ]  # fmt: skip
    assert lines[3].startswith("| without it | 0.00")


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_page_has_the_recorded_curves(name):
    page = PAGE.read_text(encoding="utf-8")
    assert with_table(page, name, read_outcomes(RECORD)) == page, "run python -m bench.examples --page"


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_settings_of_an_example_exist(name):
    example = EXAMPLES[name]
    for arm in example.arms:
        unit = example.unit(name, arm, 1e-3, SEEDS[0])
        paid = {} if example.reward is None else {"reward": example.reward}
        config = config_from_settings("ppo", {**unit.settings, "model": "m", "data.prompts": "p", **paid})
        assert config.ppo.learning_rate == 1e-3


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
