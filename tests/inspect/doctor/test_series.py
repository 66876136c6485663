"""Statistics of a metric's time series, on values worked out by hand."""

from __future__ import annotations

import math

import pytest

from kedge_inspect.doctor.series import Series, combine, fell, read, rose, span
from tests.inspect.doctor.synthetic import run_with


def series_of(*values: float) -> Series:
    return Series(range(1, len(values) + 1), values)


def test_windows_are_the_first_three_and_the_last_quarter() -> None:
    series = series_of(*range(20))
    assert (series.first, series.early, series.late) == (0, 1, 17)
    assert series.late_span == "updates 16 to 20"
    assert series_of(5.0, 1.0, 2.0, 9.0).late == 2.0  # no fewer than three


def test_a_peak_is_the_median_of_three_updates() -> None:
    series = series_of(1.0, 9.0, 1.0, 2.0, 5.0, 4.0, 6.0, 1.0)
    assert (series.peak, span(series.peak_updates)) == (5.0, "updates 5 to 7")


def test_the_error_of_a_rise_is_estimated_from_consecutive_differences() -> None:
    # Consecutive values differ by 2: a standard deviation of 1.4826·2/√2 for normal noise, and the error of a median is
    # 1.25 times that of a mean. Three early values, four late ones.
    expected = 1.25 * 1.4826 * math.sqrt(2) * math.sqrt(1 / 3 + 1 / 4)
    assert series_of(*[1.0, -1.0] * 8).rise_error == pytest.approx(expected)
    assert series_of(1.0).rise_error == math.inf
    # A single value has no median: 1² + 1.25²/4 = 1.390625
    assert series_of(*[1.0, -1.0] * 8).since(1) == (-1.0, pytest.approx(1.4826 * math.sqrt(2 * 1.390625)))


@pytest.mark.parametrize(("errors", "significant"), [(3.05, True), (2.95, False)])
def test_a_rise_is_significant_from_three_errors_on(errors: float, significant: bool) -> None:
    noise = [1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 1.0, -1.0]
    height = errors * series_of(*noise).rise_error + 2.0  # the early median is 1, the late one −1
    up = series_of(*(value + (height if index >= 5 else 0.0) for index, value in enumerate(noise)))
    down = series_of(*(-value for value in up.values))
    assert (rose(up), fell(down)) == (significant, significant)
    assert not rose(down)
    assert not rose(series_of(*range(7)))
    assert not fell(None)


def test_missing_and_non_finite_values_are_left_out() -> None:
    run = run_with(6, {"a": [1.0, math.nan, 3.0, math.inf, 5.0, 6.0]})
    series = read(run, "a")
    assert series is not None
    assert (list(series.updates), list(series.values)) == ([1, 3, 5, 6], [1.0, 3.0, 5.0, 6.0])
    assert read(run, "a", at_least=5) is None
    assert read(run, "b") is None


def test_a_part_of_a_series_keeps_its_updates() -> None:
    series = series_of(0.0, 2.0, 7.0, 0.0, 1.0).where(bool)
    assert (list(series.updates), list(series.values), series.argmax) == ([2, 3, 5], [2.0, 7.0, 1.0], 3)


def test_metrics_of_the_same_update_are_combined() -> None:
    first, second = series_of(1.0, 2.0, 3.0, 4.0, 5.0), series_of(2.0, 2.0, 2.0, 0.0, 2.0)
    series = combine(lambda a, b: a / b if b else None, first, second)
    assert series is not None
    assert (list(series.updates), list(series.values)) == ([1, 2, 3, 5], [0.5, 1.0, 1.5, 2.5])
    assert combine(max, first, Series([9], [1.0])) is None
