"""Win rates, pass@k, maj@k and calibration, against hand computations, enumeration and simulated truth."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kedge.algorithm.statistics import calibration, majority_at_k, pass_at_k, win_rate, wins
from kedge_base.errors import ShapeError


def test_wins_by_hand():
    assert wins([1.0, 2.0, 3.0, -1.0], [0.0, 2.0, 4.0, -2.0]).tolist() == [1.0, 0.5, 0.0, 1.0]
    assert win_rate([1.0, 2.0, 3.0, -1.0], [0.0, 2.0, 4.0, -2.0]).value == 2.5 / 4


@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=1, max_size=30))
def test_the_two_sides_of_a_win_rate_sum_to_one(pairs):
    ours, theirs = [list(map(float, side)) for side in zip(*pairs, strict=True)]
    slow = sum(1.0 if a > b else 0.5 if a == b else 0.0 for a, b in pairs) / len(pairs)
    assert win_rate(ours, theirs).value == pytest.approx(slow)
    assert win_rate(theirs, ours).value == pytest.approx(1 - slow)


# Answers to one prompt: 0 is the right one, None no answer.
answers = st.lists(st.sampled_from([0, 0, 1, 2, 3, None]), min_size=1, max_size=8)


def passes(drawn):
    return Fraction(0 in drawn)


def vote(drawn):
    """The right answer's chance in a vote with lots for ties."""
    counts = Counter(answer for answer in drawn if answer is not None)
    most = [answer for answer, count in counts.items() if count == max(counts.values())]
    return Fraction(0 in most, max(1, len(most)))


def over_all_subsets(figure, samples, k):
    subsets = list(itertools.combinations(samples, k))
    return float(sum(map(figure, subsets), Fraction(0)) / len(subsets))


@given(answers)
def test_pass_at_k_and_the_majority_are_means_over_all_subsets(samples):
    counts = Counter(samples)
    right, silent = counts.pop(0, 0), counts.pop(None, 0)
    for k in range(1, len(samples) + 1):
        assert pass_at_k(len(samples), right, k) == pytest.approx(over_all_subsets(passes, samples, k))
        majority = majority_at_k(right, list(counts.values()), silent, k)
        assert majority == pytest.approx(over_all_subsets(vote, samples, k))


def test_pass_at_k_has_the_published_bias_correction():
    # Chen et al., section 2.1: with c of n right, 1 − (1 − c/n)^k is too low. n = 4, c = 1, k = 2: ½, not 7/16.
    assert pass_at_k(4, 1, 2) == 0.5
    assert pass_at_k(200, 1, 100) == pytest.approx(0.5)
    assert [pass_at_k(3, right, 3) for right in range(4)] == [0, 1, 1, 1]


def test_a_majority_of_many_responses_by_hand():
    assert majority_at_k(33, [31], 0, 64) == 1
    assert majority_at_k(32, [32], 0, 64) == 0.5
    assert majority_at_k(1, [], 63, 64) == 1  # those without an answer do not vote
    assert majority_at_k(0, [], 64, 64) == 0
    assert majority_at_k(8, [8, 8, 8], 0, 32) == 0.25
    assert majority_at_k(10, [1] * 54, 0, 1) == pytest.approx(10 / 64)


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
        lambda: pass_at_k(4, 5, 1),
        lambda: pass_at_k(4, 1, 5),
        lambda: majority_at_k(1, [2], 0, 4),
        lambda: majority_at_k(1, [2], 0, 0),
        lambda: calibration([]),
        lambda: calibration([1.0], num_bins=0),
    ],
)
def test_bad_input_is_refused(call):
    with pytest.raises(ShapeError):
        call()
