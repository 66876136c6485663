"""Judges: score responses one at a time, or compare two responses in both orders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from transformers import PreTrainedTokenizerBase

from kedge.algorithm.statistics import wins
from kedge.config import Config
from kedge.errors import ConfigError, RewardError
from kedge.rewards import Responses, RewardSpec, Scores, WeightedReward, names_function
from kedge.rewards.pairwise import PairwiseJudge
from kedge.runs.inputs import load_rewards
from kedge.runs.run import Run

__all__ = ["Judge", "PairOutcomes", "ScoredResponses", "load_judge"]


JudgeMode: TypeAlias = Literal["score", "pairwise"]


@dataclass(frozen=True)
class ScoredResponses:
    """Responses of one side with their scores; None if the judge only compares."""

    responses: Responses
    scores: Scores | None


@dataclass(frozen=True)
class PairOutcomes:
    """Outcomes of pairs: 1 if our response is better, 0 if the other is, ½ for a tie, None for no decision.

    Attributes:
        wins: Outcome per pair.
        shown_first: Outcome with our response shown first; None for a judge that scores.
        shown_second: Outcome with our response shown second; None for a judge that scores.
    """

    wins: Scores
    shown_first: Scores | None = None
    shown_second: Scores | None = None

    @property
    def decided(self) -> list[float]:
        """The outcomes of the decided pairs.

        Raises:
            RewardError: No pair is decided.
        """
        decided = [win for win in self.wins if win is not None]
        if not decided:
            raise RewardError(f"the judge decided none of {len(self.wins)} pairs")
        return decided

    @property
    def counts(self) -> dict[str, int]:
        """The numbers of pairs won, tied and lost."""
        return {name: self.wins.count(win) for name, win in (("won", 1.0), ("tied", 0.5), ("lost", 0.0))}

    def position_bias(self) -> dict[str, float] | None:
        """Position bias of the judge; None for a judge that scores.

        `first_rate` is how often the response shown first won: ½ without bias, whichever is better, since each
        response is shown first once. `contradicted` is the share of pairs with two different winners; a tie in one
        order has no winner.
        """
        if self.shown_first is None or self.shown_second is None:
            return None
        both = [
            (one, two)
            for one, two in zip(self.shown_first, self.shown_second, strict=True)
            if one is not None and two is not None
        ]
        first_rate = sum(one + (1 - two) for one, two in both) / (2 * len(both))
        contradicted = sum({one, two} == {0.0, 1.0} for one, two in both) / len(both)
        return {"first_rate": first_rate, "contradicted": contradicted}


class Judge(Protocol):
    """Decides which of two responses to a prompt is better."""

    @property
    def name(self) -> str:
        """Name in reports."""
        ...

    @property
    def mode(self) -> JudgeMode:
        """True if the judge scores single responses or compares pairs."""
        ...

    def check(self, columns: Sequence[str]) -> None:
        """Check before a run that the prompts have the columns that the judge needs (`RewardError` if not)."""
        ...

    def score(self, responses: Responses) -> Scores | None:
        """One number per response, or None from a judge that only compares."""
        ...

    def compare(self, ours: ScoredResponses, theirs: ScoredResponses) -> PairOutcomes:
        """The better response to each prompt."""
        ...


@dataclass(frozen=True)
class ScoreJudge:
    """Scores one response at a time; the higher score wins."""

    reward: WeightedReward
    mode: JudgeMode = "score"

    @property
    def name(self) -> str:
        """The reward's name."""
        return self.reward.name

    def check(self, columns: Sequence[str]) -> None:
        """See `Judge`."""
        self.reward.check(columns)

    def score(self, responses: Responses) -> Scores | None:
        """See `Judge`."""
        return self.reward.score(responses)

    def compare(self, ours: ScoredResponses, theirs: ScoredResponses) -> PairOutcomes:
        """See `Judge`. Equal texts tie, even if their scores were rounded differently in different batches."""
        assert ours.scores is not None, "a scoring judge needs scores"
        assert theirs.scores is not None, "a scoring judge needs scores"
        outcomes: Scores = []
        pairs = zip(ours.scores, theirs.scores, strict=True)
        texts = zip(ours.responses.completions, theirs.responses.completions, strict=True)
        for (score, other), (text, other_text) in zip(pairs, texts, strict=True):
            if score is None or other is None:
                outcomes.append(None)
            else:
                outcomes.append(0.5 if text == other_text else float(wins([score], [other])))
        return PairOutcomes(outcomes)


@dataclass(frozen=True)
class PairJudge:
    """Compares both responses, once in each order; the pair is a tie unless both orders have the same winner."""

    judge: PairwiseJudge
    mode: JudgeMode = "pairwise"

    @property
    def name(self) -> str:
        """The function's name."""
        return self.judge.name

    def check(self, columns: Sequence[str]) -> None:
        """See `Judge`."""
        self.judge.check(columns)

    def score(self, responses: Responses) -> Scores | None:
        """None: the judge only compares."""
        return None

    def compare(self, ours: ScoredResponses, theirs: ScoredResponses) -> PairOutcomes:
        """See `Judge`."""
        shown_first = self.judge.verdicts(ours.responses, theirs.responses)
        swapped = self.judge.verdicts(theirs.responses, ours.responses)
        shown_second = [None if verdict is None else 1 - verdict for verdict in swapped]
        return PairOutcomes(
            [
                None if one is None or two is None else one if one == two else 0.5
                for one, two in zip(shown_first, shown_second, strict=True)
            ],
            shown_first,
            shown_second,
        )


def load_judge(given: RewardSpec | None, config: Config, run: Run, tokenizer: PreTrainedTokenizerBase) -> Judge:
    """Load `config.evaluate.judge`.

    Args:
        given: A function or model instead of `config.evaluate.judge`.
        config: Names the judge and its mode.
        run: Device and precision of models, and the ranks that share them.
        tokenizer: Tokenizer of the responses.

    Raises:
        ConfigError: The mode is pairwise and the judge is a reward model.
        RewardError: The function cannot be loaded or has the wrong signature.
        ModelError: The reward model cannot be loaded.
    """
    judge = str(config.evaluate.judge) if given is None else given
    if config.evaluate.judge_mode == "score":
        scorer = load_rewards(judge, config, run, tokenizer)
        return ScoreJudge(scorer)
    if not callable(judge) and not names_function(str(judge)):
        raise ConfigError(f"evaluate.judge_mode=pairwise needs a function as judge; {str(judge)!r} is a reward model")
    return PairJudge(PairwiseJudge(judge if callable(judge) else str(judge), ranks=run.ranks))
