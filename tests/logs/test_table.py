"""Result tables."""

from __future__ import annotations

import io

import pytest

from kedge.logs.table import print_table
from kedge_base.errors import ShapeError
from kedge_base.intervals import Interval


def test_a_table_holds_intervals_numbers_and_gaps():
    stream = io.StringIO()
    rows = {"SFT": [Interval(0.5, 0.45, 0.55), 4.123, None], "PPO [best]": [Interval(0.71, 0.66, 0.76), 4.9, "yes"]}
    print_table("Results", ["policy", "win rate", "quality", "note"], rows, stream=stream)
    lines = [line for line in stream.getvalue().splitlines() if line.strip()]
    assert max(map(len, lines)) <= 80
    assert lines[0].strip() == "Results"
    assert lines[1].split() == ["policy", "win", "rate", "quality", "note"]
    assert lines[3].split() == ["SFT", "0.50", "(0.45–0.55)", "4.12", "–"]
    assert lines[4].split() == ["PPO", "[best]", "0.71", "(0.66–0.76)", "4.90", "yes"]


@pytest.mark.parametrize("length", [4, 100])
def test_nothing_in_a_table_reaches_the_terminal_as_a_command(length):
    stream, hostile = io.StringIO(), "\x1b[2J\n\u202e" + "x" * length
    print_table(hostile, ["policy", hostile], {hostile: [hostile]}, stream=stream)
    assert stream.getvalue().count(r"\x1b[2J\n\u202exxxx") == 4
    assert stream.getvalue().replace("\n", "").isprintable()


def test_a_row_of_another_width_is_refused():
    with pytest.raises(ShapeError, match="row 'SFT' has 2 cells for 1 columns"):
        print_table("Results", ["policy", "quality"], {"SFT": [1.0, 2.0]}, stream=io.StringIO())


FIGURES = [Interval(0.71, 0.66, 0.76), "23 / 14 / 23", Interval(2.5, 2.4, 2.6), None, 60.0]
COLUMNS = ["policy", "win rate", "won / tied / lost", "score", "KL", "tokens"]


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
@pytest.mark.parametrize("count", [1, 2, 6])
def test_no_cell_is_cut_at_any_width(monkeypatch, width, count):
    monkeypatch.setattr("kedge.logs.table.PLAIN_WIDTH", width)
    stream, folder = io.StringIO(), "../shared-runs/of-a-long-project"
    print_table("Results", COLUMNS, {f"{folder}-{number}/model": FIGURES for number in range(count)}, stream=stream)
    text = stream.getvalue()
    for cell in ("0.71 (0.66–0.76)", "23 / 14 / 23", "2.50 (2.40–2.60)", "60.0"):
        assert text.count(cell) == count
    assert "…" not in text
    assert "KL" not in text  # no row has one
    assert max(len(line) for line in text.splitlines() if folder not in line) <= width


def test_a_table_that_is_too_wide_is_a_list_per_row():
    stream = io.StringIO()
    rows = {"SFT policy": FIGURES, "against: references": [None, *FIGURES[1:]]}
    print_table("Results", COLUMNS, rows, stream=stream)
    lines = [line.split() for line in stream.getvalue().splitlines()]
    assert lines[2] == ["SFT", "policy"]
    assert lines[3] == ["win", "rate", "0.71", "(0.66–0.76)"]
    assert ["win", "rate", "–"] in lines
