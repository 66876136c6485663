"""Scores from a Python function of texts: `f(prompts, completions, **columns) -> list[float | None]`, as in TRL."""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from inspect import Parameter
from pathlib import Path
from typing import Any, TypeVar

from kedge.errors import RewardError
from kedge.rewards.source import Responses, Scores, checked_scores

__all__ = ["FunctionReward", "words_of"]

_T = TypeVar("_T")

RESPONSE_WORDS = ("completions", "completion_ids", "stopped")
OFFERED = (*RESPONSE_WORDS, "prompts", "prompt_ids", "max_new_tokens", "seed")
"""The keyword arguments that any reward function may take, beside the prompts' columns. Texts and ids have TRL's names,
so that functions written for it run unchanged on plain prompts. Conversational prompts and their responses are texts
here, too, rendered by the chat template; a prompt's messages are in the column `messages`."""


class FunctionReward:
    """A plain or async Python function as a source of scores.

    The function gets what its signature names and nothing else: `f(completions)` is as good as
    `f(prompts, completions, **columns)`. Words of `OFFERED` come from kedge, all others from the prompts' columns.

    Args:
        function: Takes keyword arguments, most often `completions`; returns one number or None per response, or an
            awaitable of them.
        name: What messages and metrics call it; the function's own name by default.
        settings: Fixed keyword arguments for every call.

    Raises:
        RewardError: Not callable, its signature has no room for the responses, or for a setting.
    """

    def __init__(
        self, function: Callable[..., Any], *, name: str | None = None, settings: Mapping[str, Any] | None = None
    ) -> None:
        self.name = name or _name(function)
        self.function = function
        self.settings = dict(settings or {})
        self._parameters = _parameters(function, self.name)
        self._check_settings()

    @property
    def is_async(self) -> bool:
        """Whether calling the function gives a coroutine; such functions wait at the same time, see `ask`."""
        return any(inspect.iscoroutinefunction(called) for called in (self.function, type(self.function).__call__))

    @property
    def takes(self) -> list[str] | None:
        """The names of its arguments; None where it takes whatever there is."""
        if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in self._parameters):
            return None
        return [parameter.name for parameter in self._parameters]

    def check_columns(self, columns: Collection[str]) -> None:
        """Check before a run that the prompts' columns give the function what it needs.

        Raises:
            RewardError: A column has one of kedge's own words for its name, or a needed column is absent.
        """
        if taken := sorted(set(columns) & set(OFFERED)):
            raise RewardError(
                f"the prompts' column {taken[0]!r} has a name that kedge gives to reward functions; rename it"
            )
        for parameter in self._parameters:
            named = parameter.kind not in (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL)
            known = parameter.name in {*columns, *OFFERED, *self.settings}
            if named and parameter.default is Parameter.empty and not known:
                raise self._missing(parameter.name, columns)

    def scores(self, responses: Responses) -> Scores:
        """The function's scores, awaited where it is async.

        Raises:
            RewardError: The function raised, or what it returned breaks the contract of `checked_scores`.
        """
        returned = self._call(responses)
        if inspect.isawaitable(returned):
            returned = _in_a_thread(self._settled, returned)()
        return checked_scores(returned, name=self.name, count=len(responses))

    def ask(self, responses: Responses, *, timeout: float | None = None) -> Callable[[], Scores]:
        """Begin a call; its scores, or its `RewardError`, come from calling what is returned.

        An async function begins at once, and others can be asked while it waits; a plain one begins when its scores
        are called for.

        Args:
            responses: What to score.
            timeout: Not kept: nothing stops a function that runs in this process.
        """
        return _in_a_thread(self.scores, responses) if self.is_async else partial(self.scores, responses)

    def _settled(self, returned: Awaitable[object]) -> object:
        async def settle() -> object:
            return await returned

        with _named_errors(self.name):
            return asyncio.run(settle())

    def _call(self, responses: Responses) -> object:
        self.check_columns(responses.columns)
        positional, named = self._arguments(responses)
        with _named_errors(self.name):
            return self.function(*positional, **named)

    def _arguments(self, responses: Responses) -> tuple[list[Any], dict[str, Any]]:
        """What the signature asks for, as positional and keyword arguments."""
        offered: dict[str, Any] = {
            **responses.columns,
            "prompts": responses.prompts,
            "completions": responses.completions,
            "prompt_ids": responses.prompt_ids,
            "completion_ids": responses.response_ids,
            "stopped": responses.stopped,
        }
        # Copies, so that a function that sorts or empties its lists changes nothing for the sources after it.
        offered = {word: list(entries) for word, entries in offered.items()}
        offered["seed"] = responses.seed
        if responses.max_new_tokens is not None:
            offered["max_new_tokens"] = responses.max_new_tokens
        offered.update(self.settings)
        positional, named = [], {}
        for parameter in self._parameters:
            if parameter.kind is Parameter.VAR_KEYWORD:
                named = {**offered, **named}
            elif parameter.name in offered:
                value = offered.pop(parameter.name)
                if parameter.kind is Parameter.POSITIONAL_ONLY:
                    positional.append(value)
                else:
                    named[parameter.name] = value
            elif parameter.default is Parameter.empty and parameter.kind is not Parameter.VAR_POSITIONAL:
                raise self._missing(parameter.name, responses.columns)
        return positional, named

    def _check_settings(self) -> None:
        names = self.takes
        if names is not None and (unknown := sorted(set(self.settings) - set(names))):
            raise RewardError(f"{self.name} has no setting {unknown[0]!r}; it takes {', '.join(sorted(names))}")

    def _missing(self, parameter: str, columns: Collection[str]) -> RewardError:
        had = ", ".join(sorted(columns)) or "none"
        return RewardError(
            f"{self.name} takes {parameter!r}, but no column of the prompts has that name (columns: {had}); "
            "add the column, or set the parameter's value"
        )


def words_of(error: BaseException, limit: int = 300) -> str:
    """What an error of a stranger's code says, on one line, cut where it is long."""
    try:
        words = " ".join(str(error).split())
    except Exception:  # these words are a stranger's code, too
        return "(its message cannot be read)"
    return words if len(words) <= limit else f"{words[:limit]}…"


def _in_a_thread(call: Callable[[Any], _T], argument: object) -> Callable[[], _T]:
    """Begin a call in a thread of its own; what is returned waits for its result.

    In a notebook this thread already runs an event loop, and `asyncio.run` would refuse to run another.
    """
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward")
    future = executor.submit(call, argument)
    executor.shutdown(wait=False)
    return future.result


def _name(function: object) -> str:
    if not callable(function):
        raise RewardError(f"a reward function must be callable; {function!r} is a {type(function).__name__}")
    inner = function.func if isinstance(function, partial) else function
    return str(getattr(inner, "__name__", type(inner).__name__)).strip("<>")


def _parameters(function: Callable[..., Any], name: str) -> list[Parameter]:
    """The function's parameters, once it is shown that the responses can reach it."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise RewardError(f"{name} has no signature to read; wrap it in f(prompts, completions, **columns)") from error
    takes_any = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters)
    if not takes_any and not any(parameter.name in RESPONSE_WORDS for parameter in parameters):
        shown = ", ".join(str(parameter) for parameter in parameters)
        raise RewardError(f"{name}({shown}) does not take `completions`; expected f(prompts, completions, **columns)")
    return parameters


@contextmanager
def _named_errors(name: str) -> Iterator[None]:
    """Turn whatever a stranger's code raises into one line that names the function and the place."""
    try:
        yield
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).name}:{frame.lineno}"
        raise RewardError(f"{name} raised {type(error).__name__}: {words_of(error)} ({place})") from error
