"""Progress: plain lines without a terminal, a bar on one, and the estimate of the time left."""

from __future__ import annotations

import io
import math

import pytest

from kedge.training.runtime import Terminated
from kedge_base.machine.progress import Progress, format_duration, format_figure


class Clock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    hand = Clock()
    monkeypatch.setattr("kedge_base.machine.progress.monotonic", hand)
    return hand


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_lines_have_position_values_and_time_left(clock, capsys):
    with Progress("ppo", total=4) as progress:
        for step in range(1, 5):
            clock.now += 30
            progress.update(step, {"score": 0.1 * step, "kl": 2.34567})
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "ppo 1/4  score 0.100  kl 2.35  eta ?"
    assert lines[1].endswith("eta 1:00")
    assert lines[3] == "ppo 4/4  score 0.400  kl 2.35  eta 0:00"
    assert lines[4] == "ppo: done after 4 of 4 in 2:00"


def test_a_fast_stage_writes_at_most_a_line_a_second_and_the_last(clock, capsys):
    with Progress("sft", total=1_000) as progress:
        for step in range(1, 1_001):
            clock.now += 0.01
            progress.update(step)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("sft ")]
    assert 10 <= len(lines) <= 11
    assert lines[-1].startswith("sft 1000/1000")


def test_the_estimate_counts_only_this_runs_steps_without_its_first(clock):
    with Progress("ppo", total=100, done=90) as progress:
        assert progress.eta() == "?"
        clock.now += 20
        progress.update(92)
        assert progress.eta() == "?"
        clock.now += 6
        progress.update(94)
        assert progress.eta() == "0:18"


@pytest.mark.parametrize(
    ("error", "ending"),
    [
        (KeyboardInterrupt, "interrupted after 1 of 9"),
        (Terminated, "interrupted after 1 of 9"),
        (ValueError, "failed after 1 of 9"),
        (type("Made", (BaseException,), {}), "done after 1 of 9"),
    ],
)
def test_the_last_line_says_how_it_ended(error, ending, capsys):
    def fail() -> None:
        with Progress("ppo", total=9) as progress:
            progress.update(1)
            raise error

    with pytest.raises(error):
        fail()
    assert ending in capsys.readouterr().err


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_a_line_is_printed_literally(stream, monkeypatch):
    monkeypatch.setattr("sys.stderr", stream)
    with Progress("ppo", total=2) as progress:
        progress.say("the [bold] KL is 3.2")
    assert "the [bold] KL is 3.2" in stream.getvalue()


def test_a_terminal_gets_a_bar_with_the_newest_figures(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    with Progress("ppo", total=2) as progress:
        progress.update(1, {"score": -1.25})
        progress.update(2, {"score": 0.5})
    shown = stream.getvalue()
    assert "━" in shown
    assert "2/2" in shown
    assert "score 0.500" in shown
    assert "ppo: done after 2 of 2" in shown


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (7.4, "0:07"), (59.6, "1:00"), (725, "12:05"), (10_812, "3:00:12")]
)
def test_durations(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.1, "0.100"), (-12.345, "-12.3"), (123.4, "123"), (2.34567, "2.35"), (0.00123, "0.00123"), (0, "0"),
        (0.0, "0"), (512, "512"), (45_678.9, "45,679"), (3e-6, "3.00e-06"), (1.5e9, "1.50e+09"), (None, "–"),
        (math.nan, "nan"), (-math.inf, "-inf"), (True, "1"),
    ],
)  # fmt: skip
def test_figures_are_short(value, text):
    assert format_figure(value) == text
