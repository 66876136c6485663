"""Calls of reward functions that may fail: retried, narrowed down to the failing responses, counted."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, Protocol

from kedge.errors import RewardError
from kedge.rewards.source import Responses, Score, ScoringModel, Verdict

if TYPE_CHECKING:  # a reward function's process imports this module, and needs no torch
    from kedge.system.ranks import Ranks

__all__ = ["CallLimits", "CallResult", "CallTimeout", "GuardedReward", "answers_of", "reasons_of"]


@dataclass(frozen=True)
class CallLimits:
    """Limits on a reward function's calls, and how failed calls are handled.

    Attributes:
        timeout: Longest call, seconds.
        startup_timeout: Longest import of the function's module, seconds.
        retries: Further attempts after a failed call, ≥ 0.
        on_error: If they fail as well: stop the run, drop the response, or give it this score.
        memory_growth: A worker that grows by more than this after its first call is replaced, bytes.
        pause: Wait before the first retry, seconds; doubled before each further one.
    """

    timeout: float = 300.0
    startup_timeout: float = 600.0
    retries: int = 1
    on_error: Literal["stop", "drop"] | float = "stop"
    memory_growth: float = 2 * 2**30
    pause: float = 1.0


class CallTimeout(RewardError):
    """A call that did not finish in time."""


class _Function(Protocol):
    """A reward function, in this process or in a worker."""

    @property
    def name(self) -> str: ...

    def check(self, columns: Collection[str]) -> None: ...

    def start(self, responses: Responses, *, timeout: float | None = None) -> Callable[[], Sequence[Score]]: ...


@dataclass(frozen=True)
class CallResult:
    """The scores of one batch of responses, and the failed calls.

    Attributes:
        scores: One entry per response.
        dropped: Rows to be left out of the update, because the function failed on them.
        failures: Failed calls, including retries.
        timeouts: Number that did not finish in time.
        given_up: Responses without a successful call.
        reasons: The reason for each score, None for a score without one; None if no score has one.
        answers: The answer that each score is for; likewise.
    """

    scores: Sequence[Score]
    dropped: Sequence[int] = ()
    failures: int = 0
    timeouts: int = 0
    given_up: int = 0
    reasons: Sequence[str | None] | None = None
    answers: Sequence[str | None] | None = None

    def metrics(self, name: str) -> dict[str, float]:
        """The counts, under the function's name."""
        return {
            f"reward/{name}_failures": float(self.failures),
            f"reward/{name}_timeouts": float(self.timeouts),
            f"reward/{name}_given_up": float(self.given_up),
        }


def reasons_of(scores: Sequence[Score]) -> list[str | None] | None:
    """The reason for each score, None for a score without one; None if no score has one.

    They are kept apart from the scores: a score that goes to another rank or into a checkpoint is a number.
    """
    reasons = [score.reason if isinstance(score, Verdict) else None for score in scores]
    return reasons if any(reasons) else None


def answers_of(scores: Sequence[Score]) -> list[str | None] | None:
    """The answer that each score is for, None for a score without one; None if no score has one."""
    answers = [score.answer if isinstance(score, Verdict) else None for score in scores]
    return None if all(answer is None for answer in answers) else answers


class GuardedReward:
    """A reward function that retries failed calls, then handles them as the limits specify.

    If every attempt fails and `on_error` is not `stop`, the batch is split in halves, which are scored separately, and
    those that fail are split again, down to single responses: one response that the function cannot handle costs one
    score, not a batch of them. The whole search may take one more `timeout`.

    Args:
        function: The function, in this process or in a worker; None if another rank has it.
        limits: Deadlines, retries, and what follows when they are used up.
        ranks: The function runs on the first of them; all of them get its scores or its error. None for a single one.
        name: The function's name; None for its own.
    """

    def __init__(
        self, function: _Function | None, limits: CallLimits, ranks: Ranks | None = None, *, name: str | None = None
    ) -> None:
        self._loaded = function
        self._limits = limits
        self._ranks = ranks
        self.name = name or self._function.name

    @property
    def _function(self) -> _Function:
        assert self._loaded is not None, "the first rank has the function"
        return self._loaded

    @property
    def models(self) -> Mapping[str, ScoringModel]:
        """None, see `FunctionReward.models`."""
        return {}

    def check(self, columns: Collection[str]) -> None:
        """See `FunctionReward.check`."""
        if self._ranks is None:
            self._function.check(columns)
        else:
            self._ranks.first(lambda: self._function.check(columns))

    def score(self, responses: Responses) -> Sequence[Score]:
        """See `start`."""
        return self.start(responses)().scores

    def start(self, responses: Responses) -> Callable[[], CallResult]:
        """Start a call; the returned function waits for its result.

        Raises:
            RewardError: From the returned function: every attempt failed, and `on_error` is `stop`.
        """
        ranks = self._ranks
        if ranks is None or not ranks.are_several:
            return partial(self._result, self._function.start(responses), responses)
        first = self._function.start(responses) if ranks.is_first else list[Score]
        return lambda: CallResult(**ranks.first(lambda: vars(self._result(first, responses))))

    def _result(self, first: Callable[[], Sequence[Score]], responses: Responses) -> CallResult:
        failures: list[RewardError] = []
        rows = range(len(responses))
        try:
            scores = dict(zip(rows, self._attempts(first, responses, failures), strict=True))
        except RewardError:
            if self._limits.on_error == "stop":
                raise
            until = time.monotonic() + self._limits.timeout
            scores = self._halves(responses, rows, until, failures)
        lost = [row for row in rows if row not in scores]
        substitute = None if isinstance(self._limits.on_error, str) else self._limits.on_error
        given = [scores.get(row, substitute) for row in rows]
        return CallResult(
            scores=given,
            dropped=lost if self._limits.on_error == "drop" else [],
            failures=len(failures),
            timeouts=sum(isinstance(failure, CallTimeout) for failure in failures),
            given_up=len(lost),
            reasons=reasons_of(given),
            answers=answers_of(given),
        )

    def _attempts(
        self, collect: Callable[[], Sequence[Score]], responses: Responses, failures: list[RewardError]
    ) -> Sequence[Score]:
        """The scores of the first attempt that succeeds, or the error of the last one."""
        for attempt in range(self._limits.retries):
            with suppress(RewardError):
                return self._counted(collect, failures)
            time.sleep(self._limits.pause * 2**attempt)
            collect = self._function.start(responses)
        return self._counted(collect, failures)

    def _halves(
        self, responses: Responses, rows: Sequence[int], until: float, failures: list[RewardError]
    ) -> dict[int, Score]:
        """The scores of a failed call's rows that succeed in smaller calls."""
        scores: dict[int, Score] = {}
        failed = deque([rows])
        while failed:
            part = failed.popleft()
            middle = len(part) // 2
            for half in (part[:middle], part[middle:]) if middle else ():
                remaining = until - time.monotonic()
                if remaining <= 0:
                    return scores
                # Half of the remaining time, so that one call that hangs leaves time for the others.
                collect = self._function.start(responses.select(half), timeout=remaining / 2)
                try:
                    scores.update(zip(half, self._counted(collect, failures), strict=True))
                except RewardError:
                    failed.append(half)
        return scores

    @staticmethod
    def _counted(collect: Callable[[], Sequence[Score]], failures: list[RewardError]) -> Sequence[Score]:
        try:
            return collect()
        except RewardError as error:
            failures.append(error)
            raise
