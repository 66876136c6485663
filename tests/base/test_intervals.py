"""Confidence intervals: by hand, against tables, and how often they contain the truth in simulations."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from statistics import fmean

import pytest

from kedge_base.errors import ShapeError
from kedge_base.intervals import (
    Interval,
    mean_interval,
    resampled_interval,
    score_interval,
    share_interval,
    student_quantile,
)

TRIALS = 1_000
"""The standard error of a coverage of 95 % is then 0.7 points."""


def coverage(interval: Callable[[list[float]], Interval], draw: Callable[[], list[float]], truth: float) -> float:
    """How often the intervals of repeated samples contain the truth."""
    found = [interval(draw()) for _ in range(TRIALS)]
    return sum(each.low <= truth <= each.high for each in found) / TRIALS


@pytest.mark.parametrize(
    ("confidence", "degrees", "quantile"),
    # Any table of Student's distribution, such as Fisher and Yates 1938, table III.
    [(0.95, 1, 12.706), (0.95, 2, 4.303), (0.95, 9, 2.262), (0.95, 30, 2.042), (0.9, 2, 2.920), (0.99, 7, 3.499),
     (0.95, 1_000, 1.962), (0.5, 4, 0.741)],
)  # fmt: skip
def test_the_quantiles_of_students_distribution(confidence: float, degrees: int, quantile: float) -> None:
    assert student_quantile(confidence, degrees) == pytest.approx(quantile, abs=5e-4)  # as many digits as the table


def test_the_expansion_for_many_degrees_continues_the_series() -> None:
    assert student_quantile(0.95, 501) == pytest.approx(student_quantile(0.95, 500), abs=1e-4)


def test_a_mean_has_students_interval() -> None:
    # Ten numbers with mean 5.5 and s = 3.0277: 5.5 ± 2.262 · 3.0277 / √10 = 5.5 ± 2.1658.
    interval = mean_interval([float(number) for number in range(1, 11)])
    assert (interval.value, interval.low, interval.high) == pytest.approx((5.5, 3.3342, 7.6658), abs=1e-4)
    assert not mean_interval([3.0]).is_known
    assert mean_interval([3.0]).as_json() == {"value": 3.0, "low": None, "high": None}
    assert str(mean_interval([3.0])) == "3.00"


def test_a_share_by_hand() -> None:
    # Three wins and a tie: N = 4 + 1.96² = 7.8415, c = (3.5 + 1.9207)/N = 0.6913,
    # v = (3.25 + 1.9207)/N − c² = 0.1815, half = 1.96 · √(v/(N − 1)) = 0.3192.
    interval = share_interval([1.0, 1.0, 0.5, 1.0])
    assert (interval.value, interval.low, interval.high) == pytest.approx((0.875, 0.3721, 1.0), abs=1e-3)


def test_a_share_of_none_or_all_by_hand() -> None:
    # The largest p at which three losses in a row have a probability of 2.5 %: (1 − p)³ = 0.025, p = 0.7076.
    none, every, one = share_interval([0.0] * 3), share_interval([1.0] * 3), share_interval([0.0])
    assert (none.value, none.low, round(none.high, 4)) == (0.0, 0.0, 0.7076)
    assert (every.value, round(every.low, 4), every.high) == (1.0, 0.2924, 1.0)
    assert (one.low, one.high) == (0.0, pytest.approx(0.975))


@pytest.mark.parametrize("size", [3, 5, 10, 40])
def test_intervals_of_a_mean_cover_it_with_few_values(size: int) -> None:
    rng = random.Random(size)
    covered = coverage(mean_interval, lambda: [rng.gauss(2.0, 3.0) for _ in range(size)], 2.0)
    assert covered == pytest.approx(0.95, abs=0.025)  # more than three standard errors of the simulation


@pytest.mark.parametrize("size", [3, 10, 40])
@pytest.mark.parametrize("win", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("ties", [0.0, 0.5, 0.9])
def test_intervals_of_a_win_rate_cover_it_with_few_values_and_ties(size: int, win: float, ties: float) -> None:
    rng = random.Random(f"{size} {win} {ties}")
    weights = [(1 - ties) * win, ties, (1 - ties) * (1 - win)]
    covered = coverage(
        share_interval, lambda: rng.choices([1.0, 0.5, 0.0], weights, k=size), weights[0] + weights[1] / 2
    )
    assert covered > 0.93  # 0.9 and n = 3 lie between two outcomes; the mean over all rates is 0.98


def test_ties_narrow_the_interval_of_many_pairs() -> None:
    # 1,000 pairs, of which 100 are decided: the standard error is √(0.1 · ¼ / 1000) = 0.005, not √(¼ / 1000) = 0.016.
    interval = share_interval([1.0] * 50 + [0.5] * 900 + [0.0] * 50)
    assert interval.high - interval.low == pytest.approx(2 * 1.96 * 0.005, rel=0.05)  # the added values widen it by 2 %


@pytest.mark.parametrize("values", [[0.5] * 10, [0.0] * 10, [1.0] * 10, [1.0], [0.5, 0.5]])
def test_equal_outcomes_have_an_interval(values: list[float]) -> None:
    interval = share_interval(values)
    assert 0 <= interval.low <= values[0] <= interval.high <= 1
    assert interval.high - interval.low > 0.2


@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.999])
@pytest.mark.parametrize("values", [[1.0], [1.0] * 50, [0.0] * 7, [0.75] * 30])
def test_a_share_lies_in_its_interval(values: list[float], confidence: float) -> None:
    interval = share_interval(values, confidence=confidence)
    assert interval.low - 1e-12 <= values[0] <= interval.high + 1e-12


def test_scores_of_zero_and_one_are_shares() -> None:
    assert score_interval([[1.0]] * 8) == share_interval([1.0] * 8)
    assert score_interval([[0.0]] * 8) == share_interval([0.0] * 8)
    assert score_interval([[1.0, 0.0], [0.5, 0.5]]) == share_interval([0.5, 0.5])


def test_scores_with_partial_credit_do_not_pass_the_highest_possible() -> None:
    found = score_interval([[1.0]] * 10 + [[0.6]] * 2)  # Student's: 0.84 to 1.03
    assert mean_interval([1.0] * 10 + [0.6] * 2).high > 1
    assert 0.6 < found.low < found.value < found.high <= 1


@pytest.mark.parametrize("scores", [[0.5, 0.7, 0.9], [-1.0, 0.5, 1.0], [0.0, 1.0, 3.0], [0.0, 0.001, 0.002]])
def test_other_scores_have_the_interval_of_a_mean(scores: list[float]) -> None:
    assert score_interval([[each] for each in scores]) == mean_interval(scores)


def test_partial_credit_covers_where_students_interval_does_not() -> None:
    """Ten prompts whose responses fulfill each of five demands with probability 0.97."""
    source = random.Random(7)
    draws = [[[sum(source.random() < 0.97 for _ in range(5)) / 5] for _ in range(10)] for _ in range(TRIALS)]
    assert sum(each.low <= 0.97 <= each.high for each in map(score_interval, draws)) / TRIALS >= 0.94
    students = [mean_interval([score for [score] in draw]) for draw in draws]
    assert sum(each.low <= 0.97 <= each.high for each in students) / TRIALS < 0.9


@pytest.mark.parametrize("count", [3, 10])
def test_shares_of_several_responses_cover(count: int) -> None:
    """Eight responses to each prompt, right or wrong. Student's interval of their means covers 58 % and 78 %."""
    source = random.Random(count)

    def draw() -> list[list[float]]:
        abilities = [source.betavariate(0.9, 0.1) for _ in range(count)]
        return [[float(source.random() < ability) for _ in range(8)] for ability in abilities]

    found = [score_interval(draw()) for _ in range(TRIALS)]
    assert sum(each.low <= 0.9 <= each.high for each in found) / TRIALS >= 0.94


def test_many_units_have_the_quantiles_of_the_resamples() -> None:
    resamples = [float(number) for number in range(1_001)]
    assert resampled_interval(400.0, resamples, 30) == Interval(400.0, 25.0, 975.0)
    assert resampled_interval(400.0, [*resamples, math.nan], 30) == Interval(400.0, 25.0, 975.0)


def test_a_single_unit_may_have_any_value() -> None:
    assert resampled_interval(0.3, [0.3] * 10, 1, bounds=(0.0, 1.0)) == Interval(0.3, 0.0, 1.0)
    assert not resampled_interval(0.3, [0.3] * 10, 1).is_known


@pytest.mark.parametrize("size", [3, 8, 30])
def test_resampled_intervals_cover_the_truth_with_few_units(size: int) -> None:
    rng = random.Random(size)

    def resampled(values: Sequence[float]) -> Interval:
        return resampled_interval(fmean(values), [fmean(rng.choices(values, k=size)) for _ in range(100)], size)

    covered = coverage(resampled, lambda: [rng.gauss(0.0, 1.0) for _ in range(size)], 0.0)
    # The quantiles of 30 units cover 94 %, and 100 resamples leave noise on them.
    assert 0.91 < covered < 0.98


@pytest.mark.parametrize(
    "call",
    [
        lambda: mean_interval([]),
        lambda: mean_interval([1.0, math.nan]),
        lambda: mean_interval([1.0], confidence=1.0),
        lambda: share_interval([]),
        lambda: share_interval([1.5]),
    ],
)
def test_bad_input_is_refused(call: Callable[[], Interval]) -> None:
    with pytest.raises(ShapeError):
        call()
