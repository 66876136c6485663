"""Several reward sources as one score: their weighted sum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kedge.errors import RewardError
from kedge.rewards.function import FunctionReward, gathered_scores
from kedge.rewards.source import Responses, RewardSource, Scores

__all__ = ["ScoredTerms", "WeightedReward"]


@dataclass(frozen=True)
class ScoredTerms:
    """Scores and what they are made of.

    Attributes:
        scores: the weighted sum per response; None where no source had a score.
        terms: the sources' own scores by name, before their weights.
    """

    scores: Scores
    terms: dict[str, Scores]

    def term_means(self) -> dict[str, float]:
        """The mean of each term over the responses that it scored, for the metrics; NaN where it scored none."""
        return {f"score/{name}": _mean(scores) for name, scores in self.terms.items()}


class WeightedReward:
    """The weighted sum of several sources' scores.

    score_b = Σ_i w_i · s_ib   over the sources i that have a score for response b

    Args:
        terms: Pairs of a source and its weight. Sources of the same name are told apart by a number.

    Raises:
        RewardError: No terms, or a weight that is not a finite number.
    """

    def __init__(self, terms: Sequence[tuple[RewardSource, float]]) -> None:
        if not terms:
            raise RewardError("no reward given; name a reward model or a function")
        for source, weight in terms:
            if not math.isfinite(weight):
                raise RewardError(f"the weight of reward {source.name!r} is {weight}; expected a finite number")
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
        """The weighted sum and its terms. Async functions wait together, everything else runs in turn."""
        functions = [source for source in self.sources if isinstance(source, FunctionReward) and source.is_async]
        awaited = iter(gathered_scores(functions, responses) if functions else [])
        scored = [next(awaited) if source in functions else source.scores(responses) for source in self.sources]
        totals = [self._total([scores[row] for scores in scored]) for row in range(len(responses))]
        return ScoredTerms(totals, dict(zip(self.names, scored, strict=True)))

    def check_columns(self, columns: Sequence[str]) -> None:
        """Check before a run that the prompts' columns give every function what it needs (`RewardError` if not)."""
        for source in self.sources:
            if isinstance(source, FunctionReward):
                source.check_columns(columns)

    def _total(self, row: Scores) -> float | None:
        weighted = [weight * score for weight, score in zip(self.weights, row, strict=True) if score is not None]
        return sum(weighted) if weighted else None


def _mean(scores: Scores) -> float:
    given = [score for score in scores if score is not None]
    return sum(given) / len(given) if given else math.nan


def _distinct(names: Sequence[str]) -> list[str]:
    return [name if name not in names[:i] else f"{name}-{names[:i].count(name) + 1}" for i, name in enumerate(names)]
