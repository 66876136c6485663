"""Win rates, bootstrap intervals and calibration, against hand computations and simulated truth."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kedge.algorithm.statistics import Interval, bootstrap_interval, calibration, share_interval, win_rate, wins
from kedge.errors import ShapeError


def test_wins_by_hand():
    assert wins([1.0, 2.0, 3.0, -1.0], [0.0, 2.0, 4.0, -2.0]).tolist() == [1.0, 0.5, 0.0, 1.0]
    assert win_rate([1.0, 2.0, 3.0, -1.0], [0.0, 2.0, 4.0, -2.0]).value == 2.5 / 4


@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=1, max_size=30))
def test_the_two_sides_of_a_win_rate_sum_to_one(pairs):
    ours, theirs = [list(map(float, side)) for side in zip(*pairs, strict=True)]
    slow = sum(1.0 if a > b else 0.5 if a == b else 0.0 for a, b in pairs) / len(pairs)
    assert win_rate(ours, theirs, num_resamples=1).value == pytest.approx(slow)
    assert win_rate(theirs, ours, num_resamples=1).value == pytest.approx(1 - slow)


def test_the_interval_of_two_values_by_enumeration():
    # Resamples of {0, 1}: means 0, ½, ½, 1 with a quarter each, so any tail below a quarter is at 0 and 1.
    means = [sum(pick) / 2 for pick in itertools.product([0, 1], repeat=2)]
    assert sorted(means) == [0, 0.5, 0.5, 1]
    assert bootstrap_interval([0.0, 1.0], confidence=0.9) == Interval(0.5, 0.0, 1.0)
    assert bootstrap_interval([0.0, 1.0], confidence=0.4) == Interval(0.5, 0.5, 0.5)


def test_a_share_of_none_or_all_has_an_interval():
    # The largest p at which three losses in a row have a probability of 2.5 %: (1 − p)³ = 0.025, p = 0.7076.
    none, every, one = win_rate([0.0] * 3, [1.0] * 3), win_rate([1.0] * 3, [0.0] * 3), share_interval([0.0])
    assert (none.value, none.low, round(none.high, 4)) == (0.0, 0.0, 0.7076)
    assert (every.value, round(every.low, 4), every.high) == (1.0, 0.2924, 1.0)
    assert (one.low, one.high) == (0.0, pytest.approx(0.975))
    assert share_interval([0.5] * 3) == bootstrap_interval([0.5] * 3)


def test_the_interval_of_many_values_is_the_normal_one():
    data = torch.randn(400, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    interval = bootstrap_interval(data, num_resamples=4_000)
    half = 1.959964 * float(data.std(correction=0)) / math.sqrt(400)
    assert interval.value == pytest.approx(float(data.mean()))
    # 4,000 resamples leave about 3 % of noise on a quantile of the tail.
    assert interval.low == pytest.approx(interval.value - half, abs=0.06 * half)
    assert interval.high == pytest.approx(interval.value + half, abs=0.06 * half)


def test_ninety_percent_intervals_cover_the_truth_nine_times_in_ten():
    generator = torch.Generator().manual_seed(0)
    trials = 400
    draws = (torch.rand(trials, 60, generator=generator, dtype=torch.float64) < 0.3).double()
    intervals = [
        bootstrap_interval(row, confidence=0.9, num_resamples=400, seed=index) for index, row in enumerate(draws)
    ]
    covered = sum(interval.low <= 0.3 <= interval.high for interval in intervals) / trials
    # A binomial of 60 moves in steps of 1/60, and 400 trials have a standard error of 0.015.
    assert 0.85 < covered < 0.95


def test_the_seed_decides_and_splitting_into_chunks_does_not(monkeypatch):
    data = torch.randn(9, generator=torch.Generator().manual_seed(0))
    whole = bootstrap_interval(data, seed=3)
    assert bootstrap_interval(data, seed=3) == whole
    assert bootstrap_interval(data, seed=4) != whole
    monkeypatch.setattr("kedge.algorithm.statistics._CHUNK", 700)
    assert bootstrap_interval(data, seed=3) == whole


def test_an_interval_reads_well():
    assert str(Interval(0.714, 0.651, 0.764)) == "0.71 (0.65–0.76)"


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
        lambda: bootstrap_interval([]),
        lambda: bootstrap_interval([1.0, math.nan]),
        lambda: bootstrap_interval(torch.zeros(2, 2)),
        lambda: bootstrap_interval([1.0], confidence=1.0),
        lambda: bootstrap_interval([1.0], num_resamples=0),
        lambda: wins([1.0], [1.0, 2.0]),
        lambda: calibration([]),
        lambda: calibration([1.0], num_bins=0),
    ],
)
def test_bad_input_is_refused(call):
    with pytest.raises(ShapeError):
        call()
