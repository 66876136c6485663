"""Several reward sources as one score: calls of functions that can fail, and the weighted sum of all sources."""

from __future__ import annotations

import itertools
import math
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

from kedge.rewards.function import FunctionReward
from kedge.rewards.source import Responses, RewardSource, Score, Scores, Verdict, chosen
from kedge_base.errors import LastingRewardError, NonfiniteScoreError, RewardError
from kedge_base.term_names import distinct_names

if TYPE_CHECKING:  # a reward function's process imports this module, and needs no torch
    from kedge.ranks import Ranks
    from kedge.rewards.model import ModelReward
    from kedge.rewards.worker.client import RemoteFunction

MOST_REASONS = 32
"""Maximum number of reasons with a metric per source, so that a reason per response does not flood the logs."""


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

    def explained(self) -> CallResult:
        """Add the reasons and answers of the scores, which become plain numbers when sent to other ranks or saved."""
        reasons = [score.reason if isinstance(score, Verdict) else None for score in self.scores]
        answers = [score.answer if isinstance(score, Verdict) else None for score in self.scores]
        return replace(
            self,
            reasons=reasons if any(reasons) else None,
            answers=None if all(answer is None for answer in answers) else answers,
        )

    def metrics(self, name: str) -> dict[str, float]:
        """The counts, under the function's name."""
        return {
            f"reward/{name}_failures": float(self.failures),
            f"reward/{name}_timeouts": float(self.timeouts),
            f"reward/{name}_given_up": float(self.given_up),
        }


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
        function: FunctionReward | RemoteFunction | None,
        limits: CallLimits,
        ranks: Ranks | None = None,
        *,
        name: str | None = None,
    ) -> None:
        self.models: Mapping[str, ModelReward] = {}  # as in FunctionReward
        self._function = cast("FunctionReward | RemoteFunction", function)  # only called on the rank that has it
        self._limits = limits
        self._ranks = ranks
        self.name = name or self._function.name

    def close(self) -> None:
        """End the function's process, if any."""
        if self._function:
            self._function.close()

    def check(self, columns: Collection[str]) -> None:
        """See `FunctionReward.check`."""
        self._on_first(lambda: self._function.check(columns))

    def score(self, responses: Responses) -> Sequence[Score]:
        """See `start`."""
        return self.start(responses)().scores

    def start(self, responses: Responses) -> Callable[[], CallResult]:
        """Start a call; the returned function waits for its result.

        Raises:
            DataError: A column contains a value that cannot be sent to another process.
            RewardError: From the returned function: every attempt failed, and `on_error` is `stop`; or one failed with
                a `LastingRewardError`, with any `on_error`.
        """
        started: list[Callable[[], Sequence[Score]]] = []  # empty on the other ranks, which get an error all the same
        self._on_first(lambda: started.append(self._function.start(responses)))
        return lambda: CallResult(**self._on_first(lambda: vars(self._result(started[0], responses))))

    def _on_first(self, do: Callable[[], Any]) -> Any:
        return do() if self._ranks is None else self._ranks.first(do)

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
        ).explained()

    def _attempts(
        self, collect: Callable[[], Sequence[Score]], responses: Responses, failures: list[RewardError]
    ) -> Sequence[Score]:
        """Retry a call; return the scores of the first attempt that succeeds, or raise the last one's error."""
        while True:
            try:
                return collect()
            except RewardError as error:
                failures.append(error)
                if len(failures) > self._limits.retries or isinstance(error, LastingRewardError):
                    raise
            time.sleep(self._limits.pause * 2 ** (len(failures) - 1))
            collect = self._function.start(responses)

    def _halves(
        self, responses: Responses, rows: Sequence[int], until: float, failures: list[RewardError]
    ) -> dict[int, Score]:
        """Split a failed call into smaller ones; return the scores of the rows that succeed."""
        scores: dict[int, Score] = {}
        failed = deque([rows])
        while failed:
            part = failed.popleft()
            middle = len(part) // 2
            for half in (part[:middle], part[middle:]) if middle else ():  # a single row has failed for good
                remaining = until - time.monotonic()
                if remaining <= 0:
                    return scores
                # Half of the remaining time, so that a call that hangs leaves time for the others.
                collect = self._function.start(responses.select(half), timeout=remaining / 2)
                try:
                    scores.update(zip(half, collect(), strict=True))
                except LastingRewardError:
                    raise
                except RewardError as error:
                    failures.append(error)
                    failed.append(half)
        return scores


@dataclass(frozen=True)
class ScoredTerms:
    """Weighted scores and their terms.

    Attributes:
        scores: the weighted sum of the per-response numbers: 0 where a response has per-token numbers only, None if no
            source scored it, or a source with `on_error=drop` failed on it.
        terms: each source's scores by name, before its weight; plain numbers, without reasons.
        failures: failed calls, as metrics.
        token_scores: the weighted sum of the per-token numbers, one list per response, None where it has
            no token scores; None if no source returned any.
        reasons: the reason for each score, by source; only of sources that give reasons.
        answers: the answer that each score is for, by source; only for sources that extract answers.
    """

    scores: Scores
    terms: Mapping[str, Sequence[Score]]
    failures: dict[str, float] = field(default_factory=dict)
    token_scores: list[list[float] | None] | None = None
    reasons: Mapping[str, Sequence[str | None]] = field(default_factory=dict)
    answers: Mapping[str, Sequence[str | None]] = field(default_factory=dict)

    @classmethod
    def joined(cls, parts: Sequence[ScoredTerms]) -> ScoredTerms:
        """Join the scores of several batches by the same sources, in order; a single one is unchanged."""
        if len(parts) == 1:
            return parts[0]
        rows = [part.token_scores or [None] * len(part.scores) for part in parts]
        return cls(
            scores=[score for part in parts for score in part.scores],
            terms={name: [score for part in parts for score in part.terms[name]] for name in parts[0].terms},
            failures=_sums([part.failures for part in parts]),
            token_scores=None if all(part.token_scores is None for part in parts) else list(itertools.chain(*rows)),
            reasons=_joined([(part.reasons, len(part.scores)) for part in parts]),
            answers=_joined([(part.answers, len(part.scores)) for part in parts]),
        )

    def select(self, rows: Sequence[int]) -> ScoredTerms:
        """Select the scores of some responses, in the order given; the failures remain those of all."""
        names = ("scores", "terms", "token_scores", "reasons", "answers")
        return replace(self, **chosen({name: getattr(self, name) for name in names}, rows))

    def with_failures(self, *others: Mapping[str, float]) -> ScoredTerms:
        """Add failed calls on other responses to these scores."""
        return replace(self, failures=_sums([self.failures, *others]))

    def totals(self) -> Scores:
        """One number per response: its score plus the sum of its token scores; None where it has neither."""
        rows = self.token_scores or [None] * len(self.scores)
        return [None if score is None else score + sum(row or ()) for score, row in zip(self.scores, rows, strict=True)]

    def reason(self, row: int) -> str | None:
        """The reason for a response's score, prefixed by source if there are several; None without one."""
        found = {name: reasons[row] for name, reasons in self.reasons.items() if reasons[row]}
        if len(self.reasons) == 1:
            return next(iter(found.values()), None)
        return "; ".join(f"{name}: {reason}" for name, reason in found.items()) or None

    def row_reasons(self) -> list[str | None] | None:
        """The reason for each response's score, see `reason`; None if no source gives reasons."""
        return [self.reason(row) for row in range(len(self.scores))] if self.reasons else None

    def metrics(self) -> dict[str, float]:
        """Each term's mean over the responses it scored, NaN where it scored none; and the shares of its reasons.

        The number of a response with per-token numbers is their sum.
        """
        means = {f"score/{name}": _mean(scores) for name, scores in self.terms.items()}
        return {**means, **self.verdicts()} if self.reasons else means

    def verdicts(self) -> dict[str, float]:
        """`verdict/NAME/REASON`: the share of each reason among the responses for which a source gave one.

        All but the most frequent reasons are counted as `other`.
        """
        shares: dict[str, float] = {}
        for name, reasons in self.reasons.items():
            given = Counter(_metric_part(reason) for reason in reasons if reason)
            words = [word for word, _ in given.most_common(MOST_REASONS)]
            for word in sorted(words):
                shares[f"verdict/{name}/{word}"] = given[word] / given.total()
            if len(words) < len(given):
                rest = given.total() - sum(given[word] for word in words)
                shares[f"verdict/{name}/other"] = shares.get(f"verdict/{name}/other", 0.0) + rest / given.total()
        return shares


class WeightedReward:
    """The weighted sum of several sources' scores.

    score_b = Σ_i w_i · s_ib   over the sources i with a score for response b; per-token scores likewise per token

    A source with weight 0 is a judge: its scores are reported like any other source's, but have no other effect.

    Args:
        terms: Pairs of a source and its weight. Sources of the same name are numbered.
        may_be_empty: Accept no terms, so that every score is 0, or only terms of weight 0, to add others later.

    Raises:
        RewardError: No terms, all weights are 0, or a weight is not finite.
    """

    def __init__(self, terms: Sequence[tuple[RewardSource, float]], *, may_be_empty: bool = False) -> None:
        if not terms and not may_be_empty:
            raise RewardError("no reward given; name a reward model or a function")
        for source, weight in terms:
            if not math.isfinite(weight):
                raise RewardError(f"the weight of reward {source.name!r} is {weight}; expected a finite number")
        if not any(weight for _, weight in terms) and not may_be_empty:
            raise RewardError("every reward has weight 0, so there is nothing to learn from; give one of them a weight")
        self.sources = [source for source, _ in terms]
        self.weights = [float(weight) for _, weight in terms]
        self.is_empty = not terms
        """True if a run learns only from a teacher, so that every score is 0."""
        self.names = distinct_names([source.name for source in self.sources])

    @classmethod
    def of_scores(cls, scores: Sequence[object]) -> WeightedReward:
        """Make the reward of responses that a caller has scored; the scores are checked like a function's."""
        given = FunctionReward(lambda completions: scores, name="scores")
        return cls([(GuardedReward(given, CallLimits(retries=0)), 1.0)])

    @property
    def name(self) -> str:
        """The names of all terms."""
        return "+".join(self.names)

    @property
    def models(self) -> Mapping[str, ModelReward]:
        """The models of all sources, by the source's name."""
        return {**self.weighted_models, **self.judges}

    @property
    def weighted_models(self) -> Mapping[str, ModelReward]:
        """The models whose scores are in the sum: all except judges."""
        return self._models(judges=False)

    @property
    def judges(self) -> Mapping[str, ModelReward]:
        """The models with weight 0."""
        return self._models(judges=True)

    def _models(self, *, judges: bool) -> dict[str, ModelReward]:
        return {
            name if len(source.models) == 1 else f"{name}/{own}": model
            for name, source, weight in zip(self.names, self.sources, self.weights, strict=True)
            for own, model in source.models.items()
            if judges is not bool(weight)
        }

    def close(self) -> None:
        """End the processes of functions; a further call starts others."""
        for source in self.sources:
            if isinstance(source, GuardedReward):
                source.close()

    def check(self, columns: Collection[str]) -> None:
        """Check before a run that the prompts have the columns that every source needs (`RewardError` if not)."""
        for source in self.sources:
            source.check(columns)

    def score(self, responses: Responses) -> Scores:
        """One number per response, see `ScoredTerms.totals`."""
        return self.score_terms(responses).totals()

    def score_terms(self, responses: Responses) -> ScoredTerms:
        """The weighted sum and its terms.

        Functions in worker processes and async functions run concurrently, all other sources one after another. A
        response on which a function with `on_error=drop` failed has no score, since a sum without that term would be on
        a different scale.
        """
        calls = [_start(source, responses) for source in self.sources]
        results = [
            collect() if weight else _recorded(collect, len(responses))
            for collect, weight in zip(calls, self.weights, strict=True)
        ]
        dropped = frozenset[int]().union(
            *(result.dropped for weight, result in zip(self.weights, results, strict=True) if weight),
            lost := [row for row, paid in enumerate(responses.paid) if math.isnan(sum(paid))],
        )
        entries = [
            [] if row in dropped else self._weighted([result.scores[row] for result in results])
            for row in range(len(responses))
        ]
        failures = {"reward/environment_given_up": float(len(lost))} if responses.paid else {}
        for name, source, result in zip(self.names, self.sources, results, strict=True):
            if isinstance(source, GuardedReward):
                failures |= result.metrics(name)
        token_scores = [_token_total(row) for row in entries]
        named = list(zip(self.names, results, strict=True))
        return ScoredTerms(
            scores=[_total(row) for row in entries] if not self.is_empty else [0.0] * len(responses),
            terms={name: [_number(score) for score in each.scores] for name, each in named},
            failures=failures,
            token_scores=None if all(row is None for row in token_scores) else token_scores,
            reasons={name: each.reasons for name, each in named if each.reasons is not None},
            answers={name: each.answers for name, each in named if each.answers is not None},
        )

    def _weighted(self, entries: Sequence[Score]) -> list[float | list[float]]:
        """Return the weighted scores of a response, without judges and sources that gave no score."""
        pairs = [(weight, entry) for weight, entry in zip(self.weights, entries, strict=True) if weight]
        return [
            [weight * number for number in entry] if isinstance(entry, list) else weight * entry
            for weight, entry in pairs
            if entry is not None
        ]


def _start(source: RewardSource, responses: Responses) -> Callable[[], CallResult]:
    if isinstance(source, GuardedReward):
        return source.start(responses)
    collect = source.start(responses) if isinstance(source, FunctionReward) else partial(source.score, responses)

    return lambda: CallResult(collect()).explained()


def _recorded(collect: Callable[[], CallResult], count: int) -> CallResult:
    """Collect a judge's result; a non-finite score, which would discard the update, is treated as no scores."""
    try:
        return collect()
    except NonfiniteScoreError:
        return CallResult([None] * count)


def _number(score: Score) -> Score:
    """The score without its reason: a checkpoint stores plain numbers."""
    return float(score) if isinstance(score, float) else score


def _total(entries: Sequence[float | list[float]]) -> float | None:
    """The sum of the per-response numbers."""
    return float(sum(entry for entry in entries if not isinstance(entry, list))) if entries else None


def _token_total(entries: Sequence[float | list[float]]) -> list[float] | None:
    """The sum of the per-token numbers, token by token."""
    rows = [entry for entry in entries if isinstance(entry, list)]
    return [sum(numbers) for numbers in zip(*rows, strict=True)] if rows else None


def _metric_part(reason: str) -> str:
    """Convert a reason to a part of a metric's name."""
    return re.sub(r"\W+", "_", reason.lower()).strip("_") or "other"


def _joined(parts: Sequence[tuple[Mapping[str, Sequence[str | None]], int]]) -> dict[str, list[str | None]]:
    """Join several batches' texts by source, given each batch's size; None entries for a batch without texts."""
    names = dict.fromkeys(name for texts, _ in parts for name in texts)
    return {name: [each for texts, count in parts for each in texts.get(name, [None] * count)] for name in names}


def _sums(counters: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Each counter's sum, in the order of first appearance."""
    names = dict.fromkeys(name for counter in counters for name in counter)
    return {name: sum(counter.get(name, 0.0) for counter in counters) for name in names}


def _mean(scores: Sequence[Score]) -> float:
    numbers = [sum(score) if isinstance(score, list) else score for score in scores if score is not None]
    return sum(numbers) / len(numbers) if numbers else math.nan
