"""Result tables."""

from __future__ import annotations

import io

import pytest

from kedge.algorithm.statistics import Interval
from kedge.errors import ShapeError
from kedge.logs.table import print_table


def test_a_table_holds_intervals_numbers_and_gaps():
    stream = io.StringIO()
    rows = {"SFT": [Interval(0.5, 0.45, 0.55), 4.123, None], "PPO [best]": [Interval(0.71, 0.66, 0.76), 4.9, "yes"]}
    print_table("Results", ["policy", "win rate", "quality", "note"], rows, stream=stream)
    lines = [line for line in stream.getvalue().splitlines() if line.strip()]
    assert lines[0].strip() == "Results"
    assert lines[1].split() == ["policy", "win", "rate", "quality", "note"]
    assert lines[3].split() == ["SFT", "0.50", "(0.45–0.55)", "4.12", "–"]
    assert lines[4].split() == ["PPO", "[best]", "0.71", "(0.66–0.76)", "4.90", "yes"]


def test_a_row_of_another_width_is_refused():
    with pytest.raises(ShapeError, match="row 'SFT' has 2 cells for 1 columns"):
        print_table("Results", ["policy", "quality"], {"SFT": [1.0, 2.0]}, stream=io.StringIO())
