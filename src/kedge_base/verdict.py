"""Parts of reward functions that work with any trainer: scores with reasons, and checks of the data's rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])


def reads(check: Callable[..., Any]) -> Callable[[_Function], _Function]:
    """Attach the function that reads a reward function's columns and settings, so that a run checks them first."""

    def decorate(function: _Function) -> _Function:
        function.__dict__["check_rows"] = check
        return function

    return decorate


class Verdict(float):
    """A score with the reason for it: a number like any other, and `reason`, a short phrase such as `wrong value`.

    A function may also return `{"score": 0.0, "reason": "wrong value"}`, which is also its form in JSON. The reasons of
    a function come from a small set: the share of each is a metric. `answer` is the answer that was found in the
    response, if any: it is used to find the majority of several responses.
    """

    __slots__ = ("answer", "reason")
    answer: str | None
    reason: str

    def __new__(cls, score: float, reason: str, answer: str | None = None) -> Verdict:
        """Make a verdict from a score, its reason, and the answer that was found."""
        verdict = super().__new__(cls, score)
        verdict.reason = reason
        verdict.answer = answer
        return verdict

    def __reduce__(self) -> tuple[type[Verdict], tuple[float, str, str | None]]:
        return Verdict, (float(self), self.reason, self.answer)

    def as_json(self) -> dict[str, Any]:
        """Score and reason, and the answer if there is one."""
        found = {} if self.answer is None else {"answer": self.answer}
        return {"score": float(self), "reason": self.reason, **found}
