"""Judges that see two responses at once and name the better one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import replace
from inspect import Parameter
from typing import Any

from kedge.errors import RewardError
from kedge.rewards.function import FunctionReward
from kedge.rewards.import_function import find_function
from kedge.rewards.source import Responses, Scores

__all__ = ["PairwiseJudge"]

SIDES = ("first", "second")
VERDICTS = (0.0, 0.5, 1.0)


class PairwiseJudge:
    """A function `f(prompts, first, second, **columns)`: 1 where the first text is better, 0 the second, ½ neither.

    It returns a list with one verdict per pair, None where it has none. In all else it is treated as a reward function:
    it may be async, and what a reward function is offered about the responses it is offered about the first ones.

    Args:
        function: The judge, or `file.py:function`, `package.module:function`.
        name: What messages call it; the function's own name by default.

    Raises:
        RewardError: No such function, or its signature has no room for two responses.
    """

    def __init__(self, function: Callable[..., Any] | str, *, name: str | None = None) -> None:
        found = find_function(function) if isinstance(function, str) else function
        if not _takes_any_keyword(found):
            shown = getattr(found, "__name__", repr(found))
            raise RewardError(f"{shown} cannot judge pairs; expected a function f(prompts, first, second, **columns)")
        self._function = FunctionReward(found, name=name)

    @property
    def name(self) -> str:
        """The function's name."""
        return self._function.name

    def check_columns(self, columns: Collection[str]) -> None:
        """Check before a run that the prompts' columns give the function what it needs (`RewardError` if not)."""
        if taken := sorted({*SIDES} & {*columns}):
            raise RewardError(f"the prompts' column {taken[0]!r} has a name that kedge gives to judges; rename it")
        self._function.check_columns([*columns, *SIDES])

    def verdicts(self, first: Responses, second: Responses) -> Scores:
        """Which of two responses to each prompt is better, shown in this order.

        Raises:
            RewardError: The function raised, or returned something else than 1, ½, 0 or None for every pair.
        """
        sides = dict(zip(SIDES, (first.completions, second.completions), strict=True))
        verdicts = self._function.scores(replace(first, columns={**first.columns, **sides}))
        for index, verdict in enumerate(verdicts):
            if verdict is not None and verdict not in VERDICTS:
                raise RewardError(
                    f"{self.name} gave pair {index} {verdict:g}; expected 1 (the first is better), 0 (the second), "
                    "0.5 (neither) or None"
                )
        return verdicts


def _takes_any_keyword(function: object) -> bool:
    if not callable(function):
        return False
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters)
