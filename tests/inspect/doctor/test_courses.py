"""What is said of a metric's course, on figures that can be reckoned by hand."""

from __future__ import annotations

import math

import pytest

from kedge.inspect.doctor.courses import Course, combined, course, fell, rose
from tests.inspect.doctor.synthetic import bare


def over(*figures: float) -> Course:
    return Course(range(1, len(figures) + 1), figures)


def test_windows_are_the_first_three_and_the_last_quarter() -> None:
    found = over(*range(20))
    assert (found.first, found.early, found.late, found.middle) == (0, 1, 17, 9.5)
    assert found.late_span == "updates 16 to 20"
    assert over(5.0, 1.0, 2.0, 9.0).late == 2.0  # no fewer than three


def test_a_peak_is_three_updates_high() -> None:
    found = over(1.0, 9.0, 1.0, 2.0, 5.0, 4.0, 6.0, 1.0)
    assert (found.peak, found.peak_span) == (5.0, "updates 5 to 7")


def test_the_error_of_a_rise_follows_from_how_neighbours_differ() -> None:
    # Neighbours differ by 2: a standard deviation of 1.4826·2/√2 for normal noise, and a median's error is 1.25 of a
    # mean's. Three early figures, four late ones.
    assert over(*[1.0, -1.0] * 8).error == pytest.approx(1.25 * 1.4826 * math.sqrt(2) * math.sqrt(1 / 3 + 1 / 4))
    assert over(1.0).error == math.inf


@pytest.mark.parametrize(("errors", "counts"), [(3.05, True), (2.95, False)])
def test_a_rise_counts_from_three_errors_on(errors: float, counts: bool) -> None:
    noise = [1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 1.0, -1.0]
    height = errors * over(*noise).error + 2.0  # the early median is 1, the late one −1
    up = over(*(value + (height if index >= 5 else 0.0) for index, value in enumerate(noise)))
    down = over(*(-figure for figure in up.figures))
    assert (rose(up), fell(down)) == (counts, counts)
    assert not rose(down)
    assert not rose(over(*range(7)))
    assert not fell(None)


def test_a_course_leaves_out_what_is_missing_or_no_number() -> None:
    run = bare(6, {"a": [1.0, math.nan, 3.0, math.inf, 5.0, 6.0]})
    found = course(run, "a")
    assert found is not None
    assert (list(found.updates), list(found.figures)) == ([1, 3, 5, 6], [1.0, 3.0, 5.0, 6.0])
    assert course(run, "a", least=5) is None
    assert course(run, "b") is None


def test_part_of_a_course_keeps_its_updates() -> None:
    found = over(0.0, 2.0, 7.0, 0.0, 1.0).where(bool)
    assert (list(found.updates), list(found.figures), found.highest) == ([2, 3, 5], [2.0, 7.0, 1.0], 3)


def test_figures_of_the_same_update_are_combined() -> None:
    run = bare(5, {"a": [1.0, 2.0, 3.0, 4.0, 5.0], "b": [2.0, 2.0, 2.0, 0.0, 2.0]})
    found = combined(run, ("a", "b"), lambda a, b: a / b if b else None)
    assert found is not None
    assert (list(found.updates), list(found.figures)) == ([1, 2, 3, 5], [0.5, 1.0, 1.5, 2.5])
    assert combined(run, ("a", "missing"), max) is None
