"""The prefix test against slow loops, hand computations and simulated critics of known quality."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kedge.algorithm.prefix_test import ordered_pairs, prefix_test, rank_correlations
from kedge_base.errors import ShapeError
from kedge_base.intervals import Interval

NAN = math.nan


def known(interval: Interval | None) -> Interval:
    assert interval is not None
    return interval


def test_by_hand():
    # Prompt 0: mean returns 1, 3; prompt 1: 2, 2. Values: 0, 1; 1, 5.
    test = prefix_test(
        torch.tensor([0.0, 1.0, 1.0, 5.0]),
        torch.tensor([[0.0, 2.0], [3.0, 3.0], [1.0, 3.0], [2.0, 2.0]]),
        torch.tensor([1.0, 1.0, 4.0, 4.0]),
        torch.tensor([7, 7, 9, 9]),
        num_resamples=10,
    )
    assert (test.num_prompts, test.num_prefixes, test.num_continuations) == (2, 4, 2.0)
    assert known(test.pairs_within).value == 1.0
    # (1 against 2, 2): right, right. (3 against 2, 2): equal values, wrong.
    assert known(test.pairs_across).value == (1 + 1 + 0.5 + 0) / 4
    assert known(test.prompt_pairs_across).value == (1 + 1 + 0 + 0) / 4
    # Errors 1, 2, 1, −3: variance (1 + 4 + 1 + 9)/4 − (1/4)² = 3.6875, that of the means is ½.
    assert known(test.explained_variance).value == pytest.approx(1 - 3.6875 / 0.5)
    # Errors of the prompt's mean 0, 2, −2, −2: variance 3 − ¼.
    assert known(test.gain).value == pytest.approx((2.75 - 3.6875) / 0.5)
    assert test.error == pytest.approx(7 / 4)
    assert test.bias == pytest.approx(-1 / 4)
    assert test.prompt_error == pytest.approx(6 / 4)
    # Unbiased variances of the returns 2, 0, 2, 0; of their means half of it, on average ½: all of the spread.
    assert test.ceiling_explained == pytest.approx(0.0)


def _slow_share(values: list[float], means: list[float], prompts: list[float], *, across: bool) -> float | None:
    right, total = 0.0, 0
    for i, j in itertools.combinations(range(len(values)), 2):
        if (prompts[i] != prompts[j]) is not across or means[i] == means[j]:
            continue
        total += 1
        if values[i] == values[j]:
            right += 0.5
        elif (values[i] < values[j]) == (means[i] < means[j]):
            right += 1
    return right / total if total else None


def _slow_ranks(numbers: list[float]) -> list[float]:
    return [
        statistics.fmean(place for place, other in enumerate(sorted(numbers)) if other == number) for number in numbers
    ]


def _slow_spearman(first: list[float], second: list[float]) -> float | None:
    """None if the second is constant, 0 if the first is."""
    if len(set(second)) < 2:
        return None
    return 0.0 if len(set(first)) < 2 else statistics.correlation(_slow_ranks(first), _slow_ranks(second))


_rows = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=12)


@settings(max_examples=25)
@given(_rows)
def test_figures_equal_those_of_slow_loops(rows):
    values, means, prompts = ([float(entry) for entry in column] for column in zip(*rows, strict=True))
    test = prefix_test(
        torch.tensor(values),
        torch.tensor(means)[:, None].expand(-1, 2),
        torch.zeros(len(rows)),
        torch.tensor(prompts).long(),
        num_resamples=1,
    )
    for found, across in ((test.pairs_within, False), (test.pairs_across, True)):
        expected = _slow_share(values, means, prompts, across=across)
        assert (found and found.value) == (None if expected is None else pytest.approx(expected))
    overall = _slow_spearman(values, means)
    assert (test.rank_correlation and test.rank_correlation.value) == (
        None if overall is None else pytest.approx(overall, abs=1e-9)
    )
    by_prompt = [
        [(value, mean) for value, mean, prompt in zip(values, means, prompts, strict=True) if prompt == each]
        for each in set(prompts)
    ]
    found_in = [
        found for each in by_prompt if (found := _slow_spearman(*map(list, zip(*each, strict=True)))) is not None
    ]
    within = test.rank_correlation_within
    assert (within and within.value) == (pytest.approx(statistics.fmean(found_in), abs=1e-9) if found_in else None)


def test_a_resample_counts_its_prompts_as_often_as_they_were_drawn():
    # Weights 2 and 1 are the list with its first entry twice: ranks and correlation follow.
    first, second = [1.0, 5.0, 2.0], [2.0, 1.0, 3.0]
    weights = torch.tensor([[2.0, 1.0, 1.0]], dtype=torch.float64)
    found = rank_correlations(torch.tensor(first), torch.tensor(second), weights)
    expected = _slow_spearman([1.0, *first], [2.0, *second])
    assert float(found) == pytest.approx(expected)


def test_equal_guesses_are_half_right_whatever_the_truth():
    right, differ = ordered_pairs(torch.zeros(3), torch.tensor([1.0, 1.0, 2.0]))
    assert right[differ].tolist() == [0.5] * 4


def _simulated(num_prompts: int, per_prompt: int, num_continuations: int, noise: float):
    """True values: a prompt's level plus that of the prefix, both normal with variance 1; and noisy returns."""
    draw = torch.Generator().manual_seed(3)
    level = torch.randn(num_prompts, generator=draw, dtype=torch.float64).repeat_interleave(per_prompt)
    truth = level + torch.randn(len(level), generator=draw, dtype=torch.float64)
    returns = truth[:, None] + noise * torch.randn(len(level), num_continuations, generator=draw, dtype=torch.float64)
    return truth, returns, level, torch.arange(num_prompts).repeat_interleave(per_prompt)


@pytest.fixture(scope="module")
def perfect():
    """The test of a perfect critic, of 120 prompts with noisy returns."""
    truth, returns, level, prompts = _simulated(120, 4, 8, noise=3.0)
    return prefix_test(truth, returns, level, prompts, num_resamples=200)


def test_a_perfect_critic_reaches_the_ceilings(perfect):
    # Standard deviations of the four differences over 60 seeds: 0.030, 0.013, 0.027 and 0.032; means within 0.004 of 0.
    assert known(perfect.pairs_within).value == pytest.approx(perfect.ceiling_within, abs=0.05)
    assert known(perfect.pairs_across).value == pytest.approx(perfect.ceiling_across, abs=0.03)
    assert known(perfect.explained_variance).value == pytest.approx(perfect.ceiling_explained, abs=0.08)
    # Differences of the truth have variance 2 within a prompt, their noise 2·9/8: a correlation of 1/√(1 + 9/8).
    assert perfect.ceiling_within == pytest.approx(0.5 + math.asin(1 / math.sqrt(1 + 9 / 8)) / math.pi, abs=0.04)


def test_the_prompts_mean_return_knows_no_order_within_a_prompt(perfect):
    truth, returns, level, prompts = _simulated(60, 4, 64, noise=0.5)
    test = prefix_test(level, returns, level, prompts, num_resamples=100)
    assert known(test.pairs_within).value == 0.5
    assert known(test.rank_correlation_within).value == 0.0
    assert test.pairs_across == test.prompt_pairs_across
    assert known(test.gain).value == 0.0
    assert known(perfect.gain).low > 0.05  # the levels explain half of the variance
    assert known(prefix_test(-truth, returns, level, prompts, num_resamples=50).pairs_within).value < 0.05


def test_calibration_shows_a_scale_that_is_off():
    truth, returns, level, prompts = _simulated(60, 4, 64, noise=0.5)
    test = prefix_test(3 * truth + 1, returns, level, prompts, num_resamples=50)
    assert sum(each.count for each in test.bins) == 240
    assert len(test.bins) == 10
    for each in test.bins:
        # The mean of 24 returns, of standard deviation 0.5/√64.
        assert each.returns.value == pytest.approx((each.value - 1) / 3, abs=0.06)
    constant = prefix_test(torch.ones(240), returns, level, prompts, num_resamples=50)
    assert [each.count for each in constant.bins] == [240]


def test_intervals_resample_prompts_not_prefixes():
    # Copies of the prefixes of a prompt say nothing new: the interval must not narrow.
    truth, returns, level, prompts = _simulated(40, 2, 4, noise=2.0)
    guess = truth + level.roll(3)
    once = prefix_test(guess, returns, level, prompts)
    copied = [each.repeat(4, *[1] * (each.dim() - 1)) for each in (guess, returns, level, prompts)]
    again = prefix_test(*copied)
    assert again.pairs_across == once.pairs_across
    assert known(again.explained_variance).low == pytest.approx(known(once.explained_variance).low)
    assert known(once.pairs_across).high - known(once.pairs_across).low > 0.05


def test_resamples_of_equal_returns_explain_nothing_whatever_their_rounding():
    # One of 30 prompts ever pays, as with a hard task: a third of the resamples lack it.
    means = torch.zeros(120)
    means[4:8] = torch.tensor([0.25, 0.5, 0.75, 1.0])
    prompts = torch.arange(30).repeat_interleave(4)
    values = means + torch.tensor([0.05, -0.05]).repeat(60)
    test = prefix_test(values, means[:, None].expand(-1, 2), means[prompts * 4], prompts)
    # Errors of variance 0.05². The prompt once among 30: returns of mean 2.5/120 and mean square 1.875/120.
    once = 1 - 0.05**2 / (1.875 / 120 - (2.5 / 120) ** 2)
    assert known(test.explained_variance).value == pytest.approx(once)
    assert known(test.explained_variance).low == pytest.approx(once)
    assert known(test.gain).low > -1.0


def test_missing_scores_are_left_out_and_a_lone_return_is_refused():
    returns = torch.tensor([[1.0, NAN, 3.0], [0.0, 0.0, 3.0]])
    test = prefix_test(torch.tensor([2.0, 1.0]), returns, torch.zeros(2), torch.tensor([0, 0]), num_resamples=5)
    assert test.error == 0.0
    assert test.num_continuations == 2.5
    assert known(test.pairs_within).value == 1.0
    assert known(test.pairs_within).low == pytest.approx(0.025)
    assert test.pairs_across is None
    assert test.ceiling_across is None
    with pytest.raises(ShapeError, match="two returns of each"):
        prefix_test(torch.zeros(1), torch.tensor([[1.0, NAN]]), torch.zeros(1), torch.tensor([0]))
