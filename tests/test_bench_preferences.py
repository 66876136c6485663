"""The benchmark of preferences: its halves, and the win rate at equal length."""

from __future__ import annotations

import random
from typing import Any

import pytest

from bench.preferences import PAIRS, at_equal_length, distinct, question, some_of_each, split


def row(prompt: str) -> dict[str, Any]:
    """A pair."""
    return {"prompt": [{"role": "user", "content": prompt}]}


def test_halves_have_no_prompt_in_common_and_few_pairs_of_each() -> None:
    rows = [row(f"Question {place % 20}") for place in range(20 * (PAIRS + 3))]
    one, other = split(rows)
    assert len(one) + len(other) == len(rows)
    assert one
    assert other
    assert not {question(each) for each in one} & {question(each) for each in other}
    assert len(some_of_each(one)) == PAIRS * len(distinct(one))


def test_wins_that_length_explains_are_none_at_equal_length() -> None:
    draw = random.Random(0)
    longer = [draw.gauss(40, 60) for _ in range(400)]
    fair = [float(draw.random() < 0.5 + 0.4 * (1 if each > 0 else -1)) for each in longer]
    assert sum(fair) / len(fair) > 0.65
    known = at_equal_length(fair, longer)
    assert known.low < 0.5 < known.high
    assert known.high - known.low < 0.2


def test_without_differences_in_length_it_is_the_win_rate() -> None:
    wins = [1.0] * 30 + [0.0] * 10 + [0.5] * 20
    assert at_equal_length(wins, [0.0] * 60).value == pytest.approx(40 / 60, abs=1e-4)
