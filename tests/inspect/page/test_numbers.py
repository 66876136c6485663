"""Number helpers of the page, against values computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge_inspect.page.changes import noise
from kedge_inspect.page.numbers import as_number, blocks, evenly_spaced, histogram, rounded


@pytest.mark.parametrize("value", [None, True, "7", math.nan, math.inf, -math.inf, [1.0]])
def test_only_finite_numbers_are_numbers(value):
    assert as_number(value) is None


def test_rounding_keeps_digits_and_makes_nonfinite_values_null():
    assert rounded({"a": [1.234567, 2.0, None, math.nan], "b": 123456.7}) == {"a": [1.2346, 2, None, None], "b": 123460}


@pytest.mark.parametrize(
    ("count", "most", "places"),
    [(3, 5, [0, 1, 2]), (5, 3, [0, 2, 4]), (10, 4, [0, 3, 6, 9]), (7, 1, [6]), (0, 4, [])],
)
def test_evenly_spaced_items_include_both_ends(count, most, places):
    assert evenly_spaced(range(count), most) == places


@given(st.integers(0, 500), st.integers(1, 60))
def test_blocks_cover_everything_once(count, most):
    found = blocks(range(count), most)
    assert [place for block in found for place in block] == list(range(count))
    assert len(found) <= most


def test_a_histogram_of_quantiles_is_that_of_the_distribution():
    # Uniform from 0 to 4: a quarter in each bin, whatever the quantiles' number.
    assert histogram([0.0, 2.0, 4.0], [0.0, 1.0, 2.0, 3.0, 4.0]) == pytest.approx([0.25] * 4)
    # Half of the mass between 0 and 1, the other between 1 and 5; bins beyond are empty.
    assert histogram([0.0, 1.0, 5.0], [-1.0, 0.0, 1.0, 3.0, 5.0, 6.0]) == pytest.approx([0, 0.5, 0.25, 0.25, 0])


def test_a_point_mass_is_in_one_bin():
    assert histogram([2.0, 2.0, 2.0], [0.0, 1.5, 2.5, 4.0]) == pytest.approx([0.0, 1.0, 0.0])
    assert sum(histogram([0.0, 0.0, 0.0, 1.0], [-0.5, 0.5, 1.5])) == pytest.approx(1.0)


def test_noise_is_the_spread_around_a_trend():
    draws = np.random.default_rng(0).normal(0, 2, 4000)
    assert noise((draws + np.linspace(0, 500, 4000)).tolist()) == pytest.approx(2, rel=0.05)  # an estimate
    assert noise([1.0, 2.0, 3.0, 4.0]) == noise([1.0, 7.0]) == noise([]) == 0
