"""Pairwise judges: functions that compare two responses to a prompt."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import replace
from inspect import Parameter
from typing import Any

from kedge.errors import RewardError
from kedge.rewards.function import RESPONSE_ARGUMENTS, SIDES, FunctionReward, find_function
from kedge.rewards.source import Responses, Scores, free_names
from kedge.system.ranks import ALONE, Ranks

VERDICTS = (None, 0.0, 0.5, 1.0)


class PairwiseJudge:
    """A function `f(prompts, first, second, **columns)`: 1 if the first text is better, 0 if the second, ½ for a tie.

    It returns a list with one verdict per pair, None for no verdict. Otherwise it works like a reward function: it may
    be async, and the arguments that describe responses describe the first ones.

    Args:
        function: The judge, or `file.py:function`, `package.module:function`.
        ranks: The function is loaded and runs on the first of them; all of them get its verdicts or its error.

    Raises:
        RewardError: No such function, or its signature does not accept two responses.
    """

    def __init__(self, function: Callable[..., Any] | str, *, ranks: Ranks = ALONE) -> None:
        self._loaded: FunctionReward | None = None
        self._ranks = ranks

        def load() -> str:
            self._loaded = _loaded(function)
            return self._loaded.name

        self._name = ranks.first(load)

    @property
    def name(self) -> str:
        """The function's name."""
        return self._name

    @property
    def _function(self) -> FunctionReward:
        assert self._loaded is not None, "the first rank has the function"
        return self._loaded

    def check(self, columns: Collection[str]) -> None:
        """Check before a run that the prompts have the columns that the function needs (`RewardError` if not)."""
        self._ranks.first(lambda: self._function.check([*free_names(columns, SIDES).values(), *SIDES]))

    def verdicts(self, first: Responses, second: Responses) -> Scores:
        """Verdicts on two responses to each prompt, shown in this order.

        Raises:
            RewardError: The function raised, or returned something other than 1, ½, 0 or None for a pair.
        """
        return self._ranks.first(lambda: self._verdicts(first, second))

    def _verdicts(self, first: Responses, second: Responses) -> Scores:
        names = free_names(first.columns, SIDES)
        columns = {names[column]: entries for column, entries in first.columns.items()}
        columns |= dict(zip(SIDES, (first.completions, second.completions), strict=True))
        verdicts: Scores = []
        for index, verdict in enumerate(self._function.score(replace(first, columns=columns))):
            if isinstance(verdict, list) or verdict not in VERDICTS:
                raise RewardError(
                    f"{self.name} returned {verdict} for pair {index}; expected 1 (the first is better), "
                    "0 (the second), 0.5 (a tie) or None"
                )
            verdicts.append(verdict)
        return verdicts


def _loaded(function: Callable[..., Any] | str) -> FunctionReward:
    found = find_function(function) if isinstance(function, str) else function
    if not _takes_two(found):
        shown = getattr(found, "__name__", repr(found))
        raise RewardError(f"{shown} cannot judge pairs; expected a function f(prompts, first, second, **columns)")
    return FunctionReward(found)


def _takes_two(function: object) -> bool:
    """True for a function of any columns that can tell two responses apart: a reward function gets one of them."""
    if not callable(function):
        return False
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    scores_one = any(name in parameters for name in RESPONSE_ARGUMENTS) and not parameters.keys() >= {*SIDES}
    return not scores_one and any(each.kind is Parameter.VAR_KEYWORD for each in parameters.values())
