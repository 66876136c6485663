"""Calls of reward functions that can fail: they are retried, narrowed down to the failing responses, and counted."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from kedge.rewards.source import Responses, Score, Verdict, checked_scores
from kedge_base.errors import LastingRewardError, RewardError

if TYPE_CHECKING:  # a reward function's process imports this module, and needs no torch
    from kedge.ranks import Ranks
    from kedge.rewards.function import FunctionReward
    from kedge.rewards.model import ModelReward
    from kedge.rewards.worker.client import RemoteFunction


@dataclass(frozen=True)
class CallLimits:
    """Limits on a reward function's calls, and how failed calls are handled.

    Attributes:
        timeout: Longest call, seconds.
        startup_timeout: Longest import of the function's module, seconds.
        retries: Further attempts after a failed call, ≥ 0.
        on_error: The action if those also fail: stop the run, drop the response, or give it this score.
        memory_growth: Growth in bytes after the first call above which a worker is replaced.
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


@dataclass(frozen=True)
class CallResult:
    """The scores of one batch of responses, and the failed calls.

    Attributes:
        scores: One entry per response.
        dropped: Rows to leave out of the update, because the function failed on them.
        failures: Number of failed calls, including retries.
        timeouts: Number of calls that did not finish in time.
        given_up: Number of responses without a successful call.
        reasons: The reason for each score, None for a score without one; None if no score has one.
        answers: The answer that each score is for, in the same form.
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

    Reasons are kept separately, since scores become plain numbers when sent to other ranks or saved.
    """
    reasons = [score.reason if isinstance(score, Verdict) else None for score in scores]
    return reasons if any(reasons) else None


def answers_of(scores: Sequence[Score]) -> list[str | None] | None:
    """The answer that each score is for, None for a score without one; None if no score has one."""
    answers = [score.answer if isinstance(score, Verdict) else None for score in scores]
    return None if all(answer is None for answer in answers) else answers


@dataclass(frozen=True)
class GivenScores:
    """Scores that a caller has computed, instead of a function.

    Attributes:
        scores: One per response, as a function returns them.
        name: Their name in metrics and messages.
    """

    scores: Sequence[object]
    name: str = "scores"

    def check(self, columns: Collection[str]) -> None:
        """Do nothing: no column is read."""

    def start(self, responses: Responses, *, timeout: float | None = None) -> Callable[[], list[Score]]:
        """See `FunctionReward.start`."""
        return partial(checked_scores, self.scores, name=self.name, lengths=responses.lengths)


class GuardedReward:
    """A reward function that retries failed calls, then handles them as the limits specify.

    If every attempt fails and `on_error` is not `stop`, the batch is split in halves, which are scored separately, and
    those that fail are split again, down to single responses: one response that the function cannot handle costs one
    score, not a batch of them. The whole search may take one more `timeout`.

    Args:
        function: The function, in this process or in a worker; None if another rank has it.
        limits: Deadlines, retries, and the action when they are exhausted.
        ranks: The function runs on the first rank; all ranks get its scores or its error. None for a single process.
        name: The function's name; None for its own.
    """

    def __init__(
        self,
        function: FunctionReward | RemoteFunction | GivenScores | None,
        limits: CallLimits,
        ranks: Ranks | None = None,
        *,
        name: str | None = None,
    ) -> None:
        self.models: Mapping[str, ModelReward] = {}  # as in FunctionReward
        self._loaded = function
        self._limits = limits
        self._ranks = ranks
        self.name = name or self._function.name

    @property
    def _function(self) -> FunctionReward | RemoteFunction | GivenScores:
        assert self._loaded is not None, "the first rank has the function"
        return self._loaded

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
            RewardError: From the returned function: every attempt failed, and `on_error` is `stop`; or one failed with
                a `LastingRewardError`, with any `on_error`.
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
        except RewardError as error:
            if self._limits.on_error == "stop" or isinstance(error, LastingRewardError):
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
        """Retry a call; return the scores of the first attempt that succeeds, or raise the last one's error."""
        for attempt in range(self._limits.retries):
            with suppress(RewardError):
                return self._counted(collect, failures)
            if isinstance(failures[-1], LastingRewardError):
                raise failures[-1]
            time.sleep(self._limits.pause * 2**attempt)
            collect = self._function.start(responses)
        return self._counted(collect, failures)

    def _halves(
        self, responses: Responses, rows: Sequence[int], until: float, failures: list[RewardError]
    ) -> dict[int, Score]:
        """Split a failed call into smaller ones; return the scores of the rows that succeed."""
        scores: dict[int, Score] = {}
        failed = deque([rows])
        while failed:
            part = failed.popleft()
            middle = len(part) // 2
            for half in (part[:middle], part[middle:]) if middle else ():
                remaining = until - time.monotonic()
                if remaining <= 0:
                    return scores
                # Half of the remaining time, so that a call that hangs leaves time for the others.
                collect = self._function.start(responses.select(half), timeout=remaining / 2)
                try:
                    scores.update(zip(half, self._counted(collect, failures), strict=True))
                except LastingRewardError:
                    raise
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
