"""Several reward sources as one score: their weighted sum."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kedge.errors import RewardError
from kedge.rewards.function import FunctionReward
from kedge.rewards.retries import Answer, GuardedReward
from kedge.rewards.source import Responses, RewardSource, Scores

__all__ = ["ScoredTerms", "WeightedReward"]


@dataclass(frozen=True)
class ScoredTerms:
    """Scores and what they are made of.

    Attributes:
        scores: the weighted sum per response; None where no source had a score, or one failed that is to drop it.
        terms: the sources' own scores by name, before their weights.
        failures: how often functions failed, as metrics.
    """

    scores: Scores
    terms: dict[str, Scores]
    failures: dict[str, float] = field(default_factory=dict)

    def term_means(self) -> dict[str, float]:
        """The mean of each term over the responses that it scored, for the metrics; NaN where it scored none."""
        return {f"score/{name}": _mean(scores) for name, scores in self.terms.items()}


class WeightedReward:
    """The weighted sum of several sources' scores.

    score_b = Σ_i w_i · s_ib   over the sources i that have a score for response b

    A source of weight 0 is a judge: it is asked, and its scores are told as those of any other; nothing is learnt from
    them.

    Args:
        terms: Pairs of a source and its weight. Sources of the same name are told apart by a number.

    Raises:
        RewardError: No terms, all of weight 0, or a weight that is not a finite number.
    """

    def __init__(self, terms: Sequence[tuple[RewardSource, float]]) -> None:
        if not terms:
            raise RewardError("no reward given; name a reward model or a function")
        for source, weight in terms:
            if not math.isfinite(weight):
                raise RewardError(f"the weight of reward {source.name!r} is {weight}; expected a finite number")
        if not any(weight for _, weight in terms):
            raise RewardError("every reward has weight 0: nothing could be learnt; give one of them a weight")
        self.sources = [source for source, _ in terms]
        self.weights = [float(weight) for _, weight in terms]
        self.names = _distinct([source.name for source in self.sources])

    @property
    def name(self) -> str:
        """The names of all terms."""
        return "+".join(self.names)

    def scores(self, responses: Responses) -> Scores:
        """The weighted sum per response, None where no source has a score."""
        return self.score_terms(responses).scores

    def score_terms(self, responses: Responses) -> ScoredTerms:
        """The weighted sum and its terms.

        Functions in processes of their own and async functions are at work at the same time, everything else in turn.
        A response on which a function failed that is to drop it has no score: a sum without that term would be on
        another scale than the others.
        """
        begun = [_begin(source, responses) for source in self.sources]
        answers = [answer() for answer in begun]
        counting = zip(self.weights, answers, strict=True)
        dropped = frozenset[int]().union(*(answer.dropped for weight, answer in counting if weight))
        rows = range(len(responses))
        totals = [None if row in dropped else self._total([each.scores[row] for each in answers]) for row in rows]
        failures: dict[str, float] = {}
        for name, source, answer in zip(self.names, self.sources, answers, strict=True):
            if isinstance(source, GuardedReward):
                failures |= answer.metrics(name)
        scored = [answer.scores for answer in answers]
        return ScoredTerms(totals, dict(zip(self.names, scored, strict=True)), failures)

    def check_columns(self, columns: Sequence[str]) -> None:
        """Check before a run that the prompts' columns give every function what it needs (`RewardError` if not)."""
        for source in self.sources:
            if isinstance(source, (FunctionReward, GuardedReward)):
                source.check_columns(columns)

    def _total(self, row: Scores) -> float | None:
        pairs = zip(self.weights, row, strict=True)
        weighted = [weight * score for weight, score in pairs if score is not None and weight]
        return sum(weighted) if weighted else None


def _begin(source: RewardSource, responses: Responses) -> Callable[[], Answer]:
    if isinstance(source, GuardedReward):
        return source.ask(responses)
    collect = source.ask(responses) if isinstance(source, FunctionReward) else partial(source.scores, responses)
    return lambda: Answer(collect())


def _mean(scores: Scores) -> float:
    given = [score for score in scores if score is not None]
    return sum(given) / len(given) if given else math.nan


def _distinct(names: Sequence[str]) -> list[str]:
    return [name if name not in names[:i] else f"{name}-{names[:i].count(name) + 1}" for i, name in enumerate(names)]
