"""Failed calls: retries, the responses they cost, and the counts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.ranks import Ranks
from kedge.rewards import CallLimits, FunctionReward, Responses, WeightedReward, load_reward
from kedge.rewards.weighted import CallTimeout, GuardedReward
from kedge_base.errors import DataError, KedgeError, RewardError

LIMITS = CallLimits(pause=0.0)


def batch(*completions: str) -> Responses:
    ids = [[1]] * len(completions)
    return Responses(["p"] * len(completions), list(completions), ids, ids, [True] * len(completions))


class Scripted:
    """A function that fails as scripted: by call, or by response."""

    name = "scripted"

    def __init__(self, *script: Exception | None, bad: tuple[str, ...] = (), slow: float = 0.0) -> None:
        self.script, self.bad, self.slow = list(script), bad, slow
        self.asked: list[list[str]] = []
        self.timeouts: list[float | None] = []

    def check(self, columns: object) -> None:
        pass

    def start(self, responses: Responses, *, timeout: float | None = None) -> Callable[[], list[float | None]]:
        def collect() -> list[float | None]:
            self.asked.append(responses.completions)
            self.timeouts.append(timeout)
            time.sleep(self.slow)
            failure = self.script.pop(0) if self.script else None
            if failure is not None:
                raise failure
            if culprits := [text for text in responses.completions if text in self.bad]:
                raise RewardError(f"cannot read {culprits[0]}")
            return [float(len(text)) for text in responses.completions]

        return collect


class FirstOfTwo(Ranks):
    """The first of two ranks, which sends the other one its results and errors."""

    sent: ClassVar[list[object]] = []

    def first(self, do: Callable[[], Any]) -> Any:
        try:
            result = do()
        except KedgeError as error:
            self.sent.append(error)
            raise
        self.sent.append(result)
        return result


def test_an_error_in_the_start_of_a_call_reaches_the_other_ranks():
    class Unsendable(Scripted):
        def start(self, responses: Responses, *, timeout: float | None = None) -> Callable[[], list[float | None]]:
            raise DataError("a column cannot be sent")

    FirstOfTwo.sent.clear()
    with pytest.raises(DataError) as raised:
        GuardedReward(Unsendable(), LIMITS, FirstOfTwo(0, 2)).start(batch("a"))()
    assert FirstOfTwo.sent == [raised.value]
    FirstOfTwo.sent.clear()
    assert GuardedReward(Scripted(), LIMITS, FirstOfTwo(0, 2)).start(batch("a"))().scores == [1.0]
    assert len(FirstOfTwo.sent) == 2


def test_a_call_that_succeeds_is_made_once():
    function = Scripted()
    result = GuardedReward(function, LIMITS).start(batch("a", "bb"))()
    assert (result.scores, result.failures, result.given_up) == ([1.0, 2.0], 0, 0)
    assert len(function.asked) == 1


def test_a_call_that_fails_is_repeated_and_counted():
    function = Scripted(RewardError("down"), CallTimeout("late"))
    result = GuardedReward(function, replace(LIMITS, retries=2)).start(batch("a"))()
    assert result.scores == [1.0]
    assert result.metrics("f") == {"reward/f_failures": 2, "reward/f_timeouts": 1, "reward/f_given_up": 0}


def test_the_waits_double(monkeypatch):
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    function = Scripted(*[RewardError("down")] * 3)
    GuardedReward(function, CallLimits(retries=3)).start(batch("a"))()
    assert [wait for wait in waits if wait] == [1.0, 2.0, 4.0]


def test_stop_raises_the_last_failure():
    function = Scripted(RewardError("first"), RewardError("last"))
    with pytest.raises(RewardError, match="last"):
        GuardedReward(function, LIMITS).start(batch("a", "b"))()
    assert len(function.asked) == 2


def test_only_the_failing_responses_are_dropped():
    function = Scripted(bad=("bad",))
    limits = replace(LIMITS, retries=0, on_error="drop")
    result = GuardedReward(function, limits).start(batch("a", "bb", "bad", "dddd", "eeeee"))()
    assert result.scores == [1.0, 2.0, None, 4.0, 5.0]
    assert result.dropped == [2]
    assert function.asked[1:] == [["a", "bb"], ["bad", "dddd", "eeeee"], ["bad"], ["dddd", "eeeee"]]
    assert (result.failures, result.given_up) == (3, 1)


def test_only_the_failing_responses_get_the_error_score():
    limits = replace(LIMITS, on_error=-3.0)
    result = GuardedReward(Scripted(bad=("bad", "worse")), limits).start(batch("bad", "a", "worse"))()
    assert (result.scores, result.dropped, result.given_up) == ([-3.0, 1.0, -3.0], [], 2)


@given(st.lists(st.sampled_from(["a", "bb", "bad"]), min_size=1, max_size=20))
def test_every_response_that_can_be_scored_is(texts):
    limits = replace(LIMITS, retries=0, on_error="drop")
    result = GuardedReward(Scripted(bad=("bad",)), limits).start(batch(*texts))()
    assert result.scores == [None if text == "bad" else float(len(text)) for text in texts]
    assert result.dropped == [row for row, text in enumerate(texts) if text == "bad"]


def test_the_search_for_failing_responses_has_one_more_timeout():
    function = Scripted(bad=tuple("abcdefgh"), slow=0.05)
    limits = replace(LIMITS, retries=0, on_error="drop", timeout=0.12)
    result = GuardedReward(function, limits).start(batch(*"abcdefgh"))()
    assert result.given_up == 8
    assert len(function.asked) < 6
    assert all(given is not None and given <= 0.12 for given in function.timeouts[1:])


def test_one_response_that_hangs_costs_one_score_and_one_more_timeout(monkeypatch):
    now = 0.0

    class Hanging(Scripted):
        def start(self, responses, *, timeout=None):
            def collect():
                nonlocal now
                if "hang" in responses.completions:
                    now += timeout or 300.0
                    raise CallTimeout("late")
                now += 1.0
                return [1.0] * len(responses)

            return collect

    monkeypatch.setattr(time, "monotonic", lambda: now)
    texts = ["fine"] * 64
    texts[5] = "hang"
    result = GuardedReward(Hanging(), replace(LIMITS, retries=0, on_error="drop")).start(batch(*texts))()
    assert result.dropped == [5]
    assert 300 < now <= 600


def test_nan_in_one_response_costs_that_response():
    reward = load_reward(lambda completions: [math.nan if t == "b" else 1.0 for t in completions],
                         limits=replace(LIMITS, on_error="drop"))  # fmt: skip
    scored = reward.score_terms(batch("a", "b", "c"))
    assert scored.scores == [1.0, None, 1.0]
    assert scored.failures["reward/lambda_given_up"] == 1


def test_a_response_that_one_function_failed_on_has_no_score_at_all():
    failing = GuardedReward(Scripted(bad=("b",)), replace(LIMITS, on_error="drop"))
    silent = FunctionReward(lambda completions: [None, 10.0, None], name="silent")
    scored = WeightedReward([(failing, 1.0), (silent, 1.0)]).score_terms(batch("a", "b", "c"))
    assert scored.scores == [1.0, None, 1.0]
    assert scored.terms == {"scripted": [1.0, None, 1.0], "silent": [None, 10.0, None]}
    assert set(scored.failures) == {f"reward/scripted_{what}" for what in ("failures", "timeouts", "given_up")}


@pytest.mark.parametrize("size", [1, 4_000_000])
def test_named_functions_run_concurrently(tmp_path, size):
    """Also with more responses than fit into the buffer of a worker's connection."""
    (tmp_path / "together.py").write_text(
        "import os, time\nfrom pathlib import Path\n\ndef f(completions):\n"
        "    (Path(__file__).parent / f'begun-{os.getpid()}').touch()\n"
        "    until = time.monotonic() + 30\n"
        "    while len(list(Path(__file__).parent.glob('begun-*'))) < 3:\n"
        "        assert time.monotonic() < until, 'the others did not begin'\n"
        "        time.sleep(0.01)\n"
        "    return [1.0]\n"
    )
    reward = load_reward([f"{tmp_path}/together.py:f"] * 3)
    assert reward.score(batch("a" * size)) == [3.0]


def test_functions_are_loaded_before_models(tmp_path):
    with pytest.raises(RewardError, match=r"'missing.py' does not exist"):
        load_reward([str(tmp_path / "no-model"), "missing.py:f"])
