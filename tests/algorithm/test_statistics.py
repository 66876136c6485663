"""Win rates and calibration, against hand computations and simulated truth."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kedge.algorithm.statistics import calibration, win_rate, wins
from kedge.errors import ShapeError


def test_wins_by_hand():
    assert wins([1.0, 2.0, 3.0, -1.0], [0.0, 2.0, 4.0, -2.0]).tolist() == [1.0, 0.5, 0.0, 1.0]
    assert win_rate([1.0, 2.0, 3.0, -1.0], [0.0, 2.0, 4.0, -2.0]).value == 2.5 / 4


@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=1, max_size=30))
def test_the_two_sides_of_a_win_rate_sum_to_one(pairs):
    ours, theirs = [list(map(float, side)) for side in zip(*pairs, strict=True)]
    slow = sum(1.0 if a > b else 0.5 if a == b else 0.0 for a, b in pairs) / len(pairs)
    assert win_rate(ours, theirs).value == pytest.approx(slow)
    assert win_rate(theirs, ours).value == pytest.approx(1 - slow)


def test_calibration_by_hand():
    margins = [math.log(0.6 / 0.4), -math.log(0.6 / 0.4), math.log(0.9 / 0.1), math.log(0.9 / 0.1), 0.0]
    # Confidences 0.6, 0.6, 0.9, 0.9, 0.5: bins of a quarter hold {0.6, 0.6, 0.5} and {0.9, 0.9}.
    result = calibration(margins, num_bins=2)
    assert result.counts.tolist() == [3, 2]
    assert result.confidence.tolist() == pytest.approx([1.7 / 3, 0.9])
    assert result.accuracy.tolist() == pytest.approx([1.5 / 3, 1.0])
    assert result.error == pytest.approx((3 * abs(1.7 / 3 - 0.5) + 2 * 0.1) / 5)


def test_an_honest_model_is_calibrated():
    generator = torch.Generator().manual_seed(0)
    margins = 2 * torch.randn(40_000, generator=generator, dtype=torch.float64)
    chosen_wins = torch.rand(40_000, generator=generator, dtype=torch.float64) < torch.sigmoid(margins)
    honest = torch.where(chosen_wins, margins, -margins)
    assert calibration(honest).error < 0.01
    assert calibration(5 * honest).error > 0.1


def test_a_certain_model_falls_into_the_last_bin():
    result = calibration([1e4, -1e4], num_bins=4)
    assert (result.confidence.tolist(), result.accuracy.tolist(), result.error) == ([1.0], [0.5], 0.5)


@pytest.mark.parametrize(
    "call",
    [
        lambda: wins([1.0], [1.0, 2.0]),
        lambda: calibration([]),
        lambda: calibration([1.0], num_bins=0),
    ],
)
def test_bad_input_is_refused(call):
    with pytest.raises(ShapeError):
        call()
