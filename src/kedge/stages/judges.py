"""The judge: scores responses one at a time, or compares two responses in both orders."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from inspect import Parameter
from statistics import mean
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from transformers import PreTrainedTokenizerBase

from kedge.algorithm.statistics import wins
from kedge.config import Config
from kedge.ranks import ALONE, Ranks
from kedge.rewards import Responses, RewardSpec, Scores, WeightedReward
from kedge.rewards.function import RESPONSE_ARGUMENTS, SIDES, FunctionReward, find_function
from kedge.rewards.source import Score, checked_scores, free_names
from kedge.runs.inputs import load_rewards
from kedge.runs.judges import open_judge
from kedge.runs.run import Run
from kedge.stages.policy import shares_of
from kedge_base.errors import ConfigError, EnvError, RewardError
from kedge_base.intervals import Interval, score_interval
from kedge_base.machine.invocation import as_argument
from kedge_base.term_names import source_name
from kedge_base.texts import names_function, names_judge

if TYPE_CHECKING:
    from kedge.rollout.player import Player


@dataclass(frozen=True)
class ScoredResponses:
    """Responses of one side, with their scores (None if the judge only compares) and the reasons for them, if any.

    `answers` are the answers that the judge extracted from the responses, if it does. `endings` say how episodes ended.
    """

    responses: Responses
    scores: Scores | None
    reasons: list[str | None] | None = None
    verdicts: dict[str, float] = field(default_factory=dict)
    answers: list[str | None] | None = None
    endings: Sequence[str] = ()

    @property
    def num_tokens(self) -> list[int]:
        """Length of each response, in tokens of the evaluated policy."""
        return [len(ids) for ids in self.responses.response_ids]

    def figures(self, num_samples: int = 1) -> dict[str, Interval | float | None]:
        """Mean score (None if the judge only compares or scored nothing), mean length, and share with a stop token.

        Args:
            num_samples: Number of responses to each prompt; they are adjacent.
        """
        return {
            "score": mean_score(self.scores or [], num_samples),
            "length": mean(self.num_tokens),
            "eos_rate": mean(map(float, self.responses.stopped)),
        }

    def shares(self, suffix: str = "") -> dict[str, dict[str, float]]:
        """Shares of the judge's verdicts and of the endings of episodes, where available.

        Args:
            suffix: Added to the names `verdicts` and `endings`.
        """
        found = {"verdicts": self.verdicts, "endings": shares_of(self.endings)}
        return {f"{name}{suffix}": shares for name, shares in found.items() if shares}


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
        """The outcomes of the decided pairs."""
        return [win for win in self.wins if win is not None]

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


def mean_score(scores: Scores, size: int) -> Interval | None:
    """Mean over prompts of each prompt's mean score, since responses to one prompt are not independent.

    Args:
        scores: One per response; responses to a prompt are adjacent.
        size: Responses per prompt.

    Returns:
        The mean with its interval; None if no response has a score.
    """
    groups = (scores[start : start + size] for start in range(0, len(scores), size))
    scored = [known for group in groups if (known := [score for score in group if score is not None])]
    return score_interval(scored) if scored else None


VERDICTS = (None, 0.0, 0.5, 1.0)


class PairwiseJudge:
    """A function `f(prompts, first, second, **columns)`: 1 if the first text is better, 0 if the second, ½ for a tie.

    It compares two responses once in each order, and the pair is a tie unless both orders have the same winner.

    It returns a list with one verdict per pair, None for no verdict. Otherwise it works like a reward function: it may
    be async, and the arguments that describe responses describe the first ones.

    Args:
        function: The judge, or `file.py:function`, `package.module:function`.
        name: Its name; the function's own by default.
        ranks: The function is loaded and runs on the first rank; all ranks get its verdicts or its error.

    Raises:
        RewardError: No such function, or its signature does not accept two responses.
    """

    mode = "pairwise"
    _function: FunctionReward  # of the first rank, which alone calls it

    def __init__(self, function: Callable[..., Any] | str, *, name: str | None = None, ranks: Ranks = ALONE) -> None:
        self._ranks = ranks

        def load() -> str:
            self._function = _loaded(function, name)
            return self._function.name

        self.name = ranks.first(load)

    def check(self, columns: Collection[str]) -> None:
        """Check before a run that the prompts have the columns that the function needs (`RewardError` if not)."""
        self._ranks.first(lambda: self._function.check([*free_names(columns, SIDES).values(), *SIDES]))

    def verdicts(self, first: Responses, second: Responses) -> Scores:
        """Verdicts on two responses to each prompt, shown in this order.

        Raises:
            RewardError: The function raised, or returned something other than 1, ½, 0 or None for a pair.
        """
        names = free_names(first.columns, SIDES)
        columns = {names[column]: entries for column, entries in first.columns.items()}
        columns |= dict(zip(SIDES, (first.completions, second.completions), strict=True))
        pairs = replace(first, columns=columns)
        return self._ranks.first(lambda: cast("Scores", self._function.score(pairs, check=_checked_verdicts)))

    def score(self, responses: Responses) -> ScoredResponses:
        """Describe responses without scores."""
        return ScoredResponses(responses, None)

    def compare(self, ours: ScoredResponses, theirs: ScoredResponses) -> PairOutcomes:
        """Decide which response to each prompt is better."""
        first = self.verdicts(ours.responses, theirs.responses)
        swapped = self.verdicts(theirs.responses, ours.responses)
        second = [None if verdict is None else 1 - verdict for verdict in swapped]
        both = zip(first, second, strict=True)
        agreed = [None if one is None or two is None else one if one == two else 0.5 for one, two in both]
        return PairOutcomes(agreed, first, second)


def _checked_verdicts(returned: Any, *, name: str, lengths: Sequence[int]) -> list[Score]:
    """Check a judge's return value and convert it to numbers; arguments and errors as in `checked_scores`."""
    verdicts: list[Any] = list(returned) if isinstance(returned, (list, tuple)) else []
    if not any(isinstance(each, str) for each in verdicts):
        verdicts = checked_scores(returned, name=name, lengths=lengths)
    for index, verdict in enumerate(verdicts):
        if isinstance(verdict, list) or verdict not in VERDICTS:
            raise RewardError(
                f"{name} returned {verdict!r:.60} for pair {index}; expected 1 (the first is better), "
                "0 (the second), 0.5 (a tie) or None"
            )
    return verdicts


def _loaded(function: Callable[..., Any] | str, name: str | None) -> FunctionReward:
    found = find_function(function) if isinstance(function, str) else function
    if not _takes_two(found):
        shown = getattr(found, "__name__", repr(found))
        raise RewardError(f"{shown} cannot judge pairs; expected a function f(prompts, first, second, **columns)")
    return FunctionReward(found, name=name)


def _takes_two(function: object) -> bool:
    """True if a function with `**columns` can receive two responses: it does not take a single response by name."""
    if not callable(function):
        return False
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    scores_one = any(name in parameters for name in RESPONSE_ARGUMENTS) and not parameters.keys() >= {*SIDES}
    return not scores_one and any(each.kind is Parameter.VAR_KEYWORD for each in parameters.values())


@dataclass(frozen=True)
class ScoringJudge:
    """Rewards, which score one response at a time: the response to a prompt with the higher score is better."""

    rewards: WeightedReward
    mode = "score"

    @property
    def name(self) -> str:
        """Name in reports."""
        return self.rewards.name

    def check(self, columns: Collection[str]) -> None:
        """Check before a run that the prompts have the columns that the judge needs (`RewardError` if not)."""
        self.rewards.check(columns)

    def score(self, responses: Responses) -> ScoredResponses:
        """Score each response."""
        terms = self.rewards.score_terms(responses)
        answers = next((list(each) for each in terms.answers.values()), None)
        return ScoredResponses(responses, terms.totals(), terms.row_reasons(), terms.verdicts(), answers)

    def compare(self, ours: ScoredResponses, theirs: ScoredResponses) -> PairOutcomes:
        """Decide which response to each prompt is better. Equal texts tie, even if their scores were rounded
        differently.
        """
        scores = (cast("Scores", side.scores) for side in (ours, theirs))
        pairs = zip(*scores, ours.responses.completions, theirs.responses.completions, strict=True)
        return PairOutcomes(
            [
                None if one is None or two is None else 0.5 if text == other else float(wins([one], [two]))
                for one, two, text, other in pairs
            ]
        )


Judge: TypeAlias = ScoringJudge | PairwiseJudge
"""Decides which of two responses to a prompt is better; `mode` is the value of `evaluate.judge_mode`."""


def load_judge(
    config: Config,
    run: Run,
    tokenizer: PreTrainedTokenizerBase,
    player: Player | None = None,
) -> Judge:
    """Load `config.evaluate.judge`; without one, episodes are judged by their environment's reward.

    Args:
        config: Names the judge and its mode.
        run: Has the function or model that replaces the configured one, if any; also the device, the precision and the
            ranks.
        tokenizer: Tokenizer of the responses.
        player: Plays the episodes that are judged.

    Raises:
        ConfigError: The mode is pairwise and the judge is a reward model.
        EnvError: Nothing scores the episodes.
        RewardError: The function cannot be loaded or has the wrong signature.
        ModelError: The reward model cannot be loaded.
    """
    judge: RewardSpec = run.objects.get("evaluate.judge") or config.evaluate.judge or ""
    if player is not None and not judge:
        if not player.environment.is_scored:
            raise EnvError(
                f"nothing scores the episodes of {player.environment.name}: add get_reward, or {as_argument('--judge')}"
            )
        return ScoringJudge(load_rewards((), config, run, tokenizer, more=(player.reward,)))
    if config.evaluate.judge_mode == "score":
        return ScoringJudge(load_rewards(judge, config, run, tokenizer))
    if isinstance(judge, str) and names_judge(judge):
        opened = open_judge(judge, config, run.judge_folder)
        return PairwiseJudge(opened.compare, name=source_name(judge), ranks=run.ranks)
    if not callable(judge) and not names_function(str(judge)):
        raise ConfigError(f"evaluate.judge_mode=pairwise needs a function as judge; {str(judge)!r} is a reward model")
    return PairwiseJudge(judge if callable(judge) else str(judge), ranks=run.ranks)
