"""Calls of reward functions that may fail: tried again, narrowed down to the offending responses, counted."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

from kedge.errors import RewardError
from kedge.rewards.source import Responses, Scores

__all__ = ["Answer", "CallRules", "CallTimeout", "Callee", "GuardedReward"]


@dataclass(frozen=True)
class CallRules:
    """What a reward function is allowed, and what becomes of its failures.

    Attributes:
        timeout: Longest call, seconds.
        startup_timeout: Longest import of the function's module, seconds.
        retries: Further attempts after a call that failed, ≥ 0.
        on_error: When they have failed, too: end the run, leave the response without a score, or give it `error_score`.
        error_score: The score of a response whose call failed, with `value`.
        memory_growth: A worker that holds so much more than after its first call is replaced by a fresh one, bytes.
        pause: Wait before the first further attempt, seconds; doubled before each next one.
    """

    timeout: float = 300.0
    startup_timeout: float = 600.0
    retries: int = 1
    on_error: Literal["stop", "drop", "value"] = "stop"
    error_score: float = 0.0
    memory_growth: float = 2 * 2**30
    pause: float = 1.0


class CallTimeout(RewardError):
    """A call that did not end in time."""


class Callee(Protocol):
    """A reward function, wherever it runs."""

    @property
    def name(self) -> str:
        """What messages and metrics call it."""
        ...

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise `RewardError` unless the prompts' columns give the function what it needs."""
        ...

    def ask(self, responses: Responses, *, timeout: float | None = None) -> Callable[[], Scores]:
        """Begin a call; its scores, or its `RewardError`, come from calling what is returned."""
        ...


@dataclass(frozen=True)
class Answer:
    """What came of one batch of responses.

    Attributes:
        scores: One per response.
        dropped: The rows that are to have no score at all, because the function failed on them.
        failures: Calls that failed, repeated ones included.
        timeouts: How many of them did not end in time.
        given_up: Responses of which no call ended well.
    """

    scores: Scores
    dropped: frozenset[int] = frozenset()
    failures: int = 0
    timeouts: int = 0
    given_up: int = 0

    def metrics(self, name: str) -> dict[str, float]:
        """The counts, under the function's name."""
        return {
            f"reward/{name}_failures": float(self.failures),
            f"reward/{name}_timeouts": float(self.timeouts),
            f"reward/{name}_given_up": float(self.given_up),
        }


class GuardedReward:
    """A reward function whose failures are dealt with as the rules have it.

    A call that fails is repeated. Where no attempt succeeds and the run is not to stop, halves of the batch are asked
    again, and halves of those that fail, until the offending responses stand alone: one response that a function cannot
    read costs one score, not a batch of them. All of that has one more `timeout` together.

    Args:
        function: Who is called.
        rules: Deadlines, attempts, and what happens when they are used up.
    """

    def __init__(self, function: Callee, rules: CallRules) -> None:
        self._function, self._rules = function, rules

    @property
    def name(self) -> str:
        """The function's name."""
        return self._function.name

    def check_columns(self, columns: Collection[str]) -> None:
        """See `FunctionReward.check_columns`."""
        self._function.check_columns(columns)

    def scores(self, responses: Responses) -> Scores:
        """See `ask`."""
        return self.ask(responses)().scores

    def ask(self, responses: Responses) -> Callable[[], Answer]:
        """Begin a call; the answer comes from calling what is returned.

        Raises:
            RewardError: Where the answer is called for: every attempt failed, and the rules are to stop.
        """
        return partial(self._answer, self._function.ask(responses), responses)

    def _answer(self, first: Callable[[], Scores], responses: Responses) -> Answer:
        failures: list[RewardError] = []
        rows = range(len(responses))
        try:
            scores = dict(zip(rows, self._attempts(first, responses, failures), strict=True))
        except RewardError:
            if self._rules.on_error == "stop":
                raise
            until = time.monotonic() + self._rules.timeout
            scores = self._halves(responses, rows, until, failures)
        lost = [row for row in rows if row not in scores]
        substitute = self._rules.error_score if self._rules.on_error == "value" else None
        return Answer(
            scores=[scores.get(row, substitute) for row in rows],
            dropped=frozenset(lost if self._rules.on_error == "drop" else ()),
            failures=len(failures),
            timeouts=sum(isinstance(failure, CallTimeout) for failure in failures),
            given_up=len(lost),
        )

    def _attempts(self, collect: Callable[[], Scores], responses: Responses, failures: list[RewardError]) -> Scores:
        """The scores of the first attempt that succeeds; the error of the last one where none does."""
        for attempt in range(self._rules.retries):
            with suppress(RewardError):
                return self._counted(collect, failures)
            time.sleep(self._rules.pause * 2**attempt)
            collect = self._function.ask(responses)
        return self._counted(collect, failures)

    def _halves(
        self, responses: Responses, rows: Sequence[int], until: float, failures: list[RewardError]
    ) -> dict[int, float | None]:
        """The scores of those rows of a failed call that can be scored in calls without the others."""
        scores: dict[int, float | None] = {}
        failed = deque([rows])
        while failed:
            part = failed.popleft()
            middle = len(part) // 2
            for half in (part[:middle], part[middle:]) if middle else ():
                remaining = until - time.monotonic()
                if remaining <= 0:
                    return scores
                # Half of what remains: one call that hangs must not take the others' time.
                collect = self._function.ask(responses.select(half), timeout=remaining / 2)
                try:
                    scores.update(zip(half, self._counted(collect, failures), strict=True))
                except RewardError:
                    failed.append(half)
        return scores

    @staticmethod
    def _counted(collect: Callable[[], Scores], failures: list[RewardError]) -> Scores:
        try:
            return collect()
        except RewardError as error:
            failures.append(error)
            raise
