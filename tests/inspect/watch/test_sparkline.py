"""Sparklines against heights computed by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.inspect.watch.sparkline import sparkline


@pytest.mark.parametrize(
    ("figures", "width", "line"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7], 8, "▁▂▃▄▅▆▇█"),
        ([7, 0], 8, "█▁"),  # no more characters than figures
        ([5, 5, 5], 8, "▁▁▁"),
        ([], 8, ""),
        ([1, 2], 0, ""),
        ([-3.0], 4, "▁"),
        # Range 8, so each block is one unit high: 0.9 is in the first, 1 in the second, 8 in the last.
        ([0, 0.9, 1, 4, 8], 9, "▁▁▂▅█"),
        # Two figures a character: means 1, 5, 9, of which 5 is half-way: the fifth block of eight.
        ([0, 2, 4, 6, 8, 10], 3, "▁▅█"),
        # Five figures on two characters: the first two, then the last three. Means 1.5 and 4.
        ([1, 2, 3, 4, 5], 2, "▁█"),
        ([0, math.nan, 7, math.inf], 4, "▁ █ "),
        ([0, math.nan, 6, 8], 2, "▁█"),  # what is not finite is left out of a mean
        ([math.nan, math.nan], 2, "  "),
        ([1e308, 1e308, 1, 2], 2, " ▁"),  # a mean that no number can hold
    ],
)
def test_heights(figures, width, line):
    assert sparkline(figures, width) == line


@given(st.lists(st.floats(), max_size=40), st.integers(0, 20))
def test_anything_can_be_drawn(figures, width):
    line = sparkline(figures, width)
    assert len(line) == min(width, len(figures))
    assert set(line) <= set(" ▁▂▃▄▅▆▇█")
