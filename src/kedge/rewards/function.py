"""Python functions as reward sources: `f(prompts, completions, **columns) -> list`, as in TRL."""

from __future__ import annotations

import asyncio
import difflib
import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from inspect import Parameter
from typing import TYPE_CHECKING, Any

from kedge.rewards.source import PROMPT_NUMBER, Responses, Score, checked_scores, free_names
from kedge_base.errors import LastingRewardError, RewardError, RunEnded
from kedge_base.generators import seeded
from kedge_base.importing import find_named
from kedge_base.texts import place_of, typed_error_text
from kedge_base.workers.codec import own_copy
from kedge_base.workers.event_loop import event_loop

if TYPE_CHECKING:  # a reward function's process imports this module, and needs no torch
    from kedge.rewards.model import ModelReward

TURN_ARGUMENTS = ("last_turns", "episodes")
"""Arguments with the turns of responses; only passed to functions that name them."""
RESPONSE_ARGUMENTS = ("completions", "completion_ids", "stopped", *TURN_ARGUMENTS)
RESERVED_ARGUMENTS = (*RESPONSE_ARGUMENTS, "prompts", "prompt_ids", "max_new_tokens", "seed")
"""The keyword arguments available to every reward function, next to the prompts' columns. Texts and ids have TRL's
names, so that functions written for TRL and plain prompts run unchanged. Conversational prompts and responses are also
passed as text, rendered by the chat template; a prompt's messages are in the column `messages`."""


OF_TRL = {
    "environments": "the environments of a batch, which pay their reward themselves here",
    "trainer_state": "the state of its trainer; max_new_tokens and seed are what kedge passes of a run",
    "log_metric": "a function that logs a number; here, return scores with reasons, whose shares are metrics",
    "log_extra": "a function that logs a column; here, the samples of a run have its columns",
}
"""Arguments that TRL passes to reward functions but kedge does not."""

SIDES = ("first", "second")
"""The arguments of a pairwise judge."""
AS_TEXT = (
    "; prompts and completions are texts, also those of conversations: use `completion`, not "
    '`completion[0]["content"]`; a prompt\'s messages are in the column `messages`'
)
"""Hint for an error in a function that mistakes a text for a message."""
COMPARES = (
    "takes two responses, `first` and `second`, and each is scored by itself here; as a judge of kedge evaluate it "
    "needs evaluate.judge_mode=pairwise"
)


class FunctionReward:
    """A plain or async Python function as a reward source.

    The function receives the arguments in its signature and nothing else: `f(completions)` works as well as
    `f(prompts, completions, **columns)`. `RESERVED_ARGUMENTS` come from kedge, all others from the prompts' columns; a
    column of such a name, as UltraFeedback's `completions`, is passed as `given_completions`.

    Args:
        function: Takes keyword arguments, usually `completions`; returns a `Score` per response, or an awaitable of
            them.
        name: Its name in metrics and messages; the function's own name by default.
        settings: Fixed keyword arguments for every call.
        skips_missing: A function that checks its rows gives no score to prompts that lack one of its columns, such as
            those for other verifiers in a mixture of tasks. Otherwise such rows are rejected.

    Raises:
        RewardError: It is not callable, or its signature does not accept the responses or a setting.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        settings: Mapping[str, Any] | None = None,
        skips_missing: bool = False,
    ) -> None:
        self.name = name or name_of(function)
        self.models: Mapping[str, ModelReward] = {}  # models inside a function are unknown
        self.pace = 0.0, 1  # longest time for a response, and how many are scored at a time
        self._skips_missing = skips_missing
        self.function = function
        self.settings = dict(settings or {})
        self._parameters = _parameters(function, self.name)
        self._module = str(getattr(_inner(function), "__module__", ""))
        self._is_ours = self._module.startswith(("kedge.rewards.", "kedge_tasks."))
        self._only_settings = {
            parameter.name
            for parameter in self._parameters
            if self._is_ours and parameter.kind is Parameter.KEYWORD_ONLY
        }
        self._check_settings()

    def close(self) -> None:
        """Do nothing: it has no process."""

    @property
    def is_async(self) -> bool:
        """True if calling the function returns a coroutine."""
        return any(inspect.iscoroutinefunction(called) for called in (self.function, type(self.function).__call__))

    @property
    def argument_names(self) -> list[str] | None:
        """The names of the function's arguments; None if it takes `**columns`."""
        if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in self._parameters):
            return None
        return [parameter.name for parameter in self._parameters]

    @property
    def checks_rows(self) -> bool:
        """True if the function can check the prompts' columns before a run; see `check`."""
        return hasattr(self.function, "check_rows")

    def check(self, columns: Collection[str]) -> None:
        """Check before a run that the prompts have the columns that the function needs.

        A function may have an attribute `check_rows`, a function of those of its columns and settings that it names; it
        raises a `RewardError` for an unusable row, which is then found before any rollout. It may return the maximum
        seconds that a response takes, by which the limit of a call grows; or these, and how many it scores at a time.

        Args:
            columns: The names, or a mapping with an entry per prompt in each column, which `check_rows` reads.

        Raises:
            RewardError: A required column is missing, or a row cannot be used.
        """
        self._check_names(columns)
        if self.checks_rows and isinstance(columns, Mapping):
            names = self.argument_names
            columns_by_name = self._columns_for(columns)
            passed = {name: entries for name, entries in columns_by_name.items() if names is None or name in names}
            rows = self._rows_with_all(passed)
            if rows == []:
                raise RewardError(f"{self.name}: no prompt has an entry in all of its columns ({', '.join(passed)})")
            if rows is not None:
                passed = {name: [entries[row] for row in rows] for name, entries in passed.items()}
            check_rows = self.function.check_rows  # pyright: ignore[reportFunctionMemberAccess]
            parameters = inspect.signature(check_rows).parameters
            takes_all = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values())
            given = {
                name: value
                for name, value in {**passed, **self.settings}.items()
                if name in parameters or (takes_all and name in passed)
            }
            try:
                with _one_line_errors(self.name):
                    told = check_rows(**given)
            except RewardError as error:
                if rows is None:
                    raise
                text = PROMPT_NUMBER.sub(lambda found: f"prompt {rows[int(found[1]) - 1] + 1}", str(error), count=1)
                raise RewardError(text) from error
            match told if isinstance(told, tuple) else (told, 1):
                case (int() | float() as seconds, int() as at_a_time) if at_a_time > 0:
                    self.pace = max(self.pace, (seconds, at_a_time))

    def _rows_with_all(self, columns: Mapping[str, Sequence[Any]]) -> list[int] | None:
        """The rows with an entry in every column that the function needs; None if the function gets all rows."""
        if not (self._skips_missing and self.checks_rows):
            return None
        needed = [
            columns[parameter.name]
            for parameter in self._parameters
            if parameter.default is Parameter.empty and parameter.name in columns
        ]
        if not needed:
            return None
        return [
            row for row, entries in enumerate(zip(*needed, strict=True)) if all(each is not None for each in entries)
        ]

    def _columns_for(self, columns: Mapping[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
        """See `given_columns`; kedge's own functions do not get columns that are named like one of their settings."""
        given = given_columns(columns)
        return {name: entries for name, entries in given.items() if name not in self._only_settings}

    def _rows_to_score(self, responses: Responses) -> list[int] | None:
        """The responses whose rows have all needed columns; None if all do, or if the function gets all rows."""
        rows = self._rows_with_all(self._columns_for(responses.columns))
        return None if rows is None or len(rows) == len(responses) else rows

    def _check_names(self, columns: Collection[str]) -> None:
        columns = {*free_names(columns, RESERVED_ARGUMENTS).values()} - self._only_settings
        for parameter in self._parameters:
            named = parameter.kind not in (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL)
            known = parameter.name in {*columns, *RESERVED_ARGUMENTS, *self.settings}
            if named and parameter.default is Parameter.empty and not known:
                raise self._missing(parameter.name, columns)

    def score(self, responses: Responses, *, check: Callable[..., list[Score]] = checked_scores) -> list[Score]:
        """The function's scores, awaited if it is async.

        Args:
            responses: The responses to score.
            check: As `checked_scores`.

        Raises:
            RewardError: The function raised, or its result was rejected.
        """
        return self.start(responses, check=check)()

    def start(
        self,
        responses: Responses,
        *,
        timeout: float | None = None,
        check: Callable[..., list[Score]] = checked_scores,
    ) -> Callable[[], list[Score]]:
        """Start a call; the returned function waits for its scores, or raises its `RewardError`.

        An async function starts immediately, so that several run concurrently; a plain one runs when its scores are
        collected.

        Args:
            responses: The responses to score.
            timeout: Ignored: a function in this process cannot be stopped.
            check: As `checked_scores`.
        """
        if (rows := self._rows_to_score(responses)) is not None:
            numbered = partial(check, rows=rows)
            collect = self.start(responses.select(rows), check=numbered) if rows else list[Score]
            return lambda: _filled(rows, collect(), len(responses))
        if self.is_async:
            result = event_loop().submit(self._call_and_await(responses)).result
        else:
            result = partial(self._call, responses)

        def scores() -> list[Score]:
            returned = result()
            if inspect.isawaitable(returned):
                returned = event_loop().run(self._await(returned))
            return check(returned, name=self.name, lengths=responses.lengths)

        return scores

    async def _call_and_await(self, responses: Responses) -> object:
        return await self._await(self._call(responses))

    async def _await(self, returned: Any) -> object:
        with _one_line_errors(self.name):
            return await returned

    def _call(self, responses: Responses) -> object:
        positional, named = self._arguments(responses)
        # An async function draws after this call, interleaved with others; making them take turns would delay them.
        turn = nullcontext() if self.is_async else seeded(responses.seed)
        with _one_line_errors(self.name), turn:
            return self.function(*positional, **named)

    def _arguments(self, responses: Responses) -> tuple[list[Any], dict[str, Any]]:
        """The arguments in the function's signature, positional and by keyword."""
        columns = self._columns_for(responses.columns)
        available: dict[str, Any] = {
            **columns,
            "prompts": responses.prompts,
            "completions": self._texts(responses),
            "prompt_ids": responses.prompt_ids,
            "completion_ids": responses.response_ids,
            "stopped": responses.stopped,
            "seed": responses.seed,
        }
        if responses.max_new_tokens is not None:
            available["max_new_tokens"] = responses.max_new_tokens
        names = {parameter.name for parameter in self._parameters}
        available |= {name: getattr(responses, name) for name in TURN_ARGUMENTS if name in names}
        available.update(self.settings)
        positional = []
        named = {}
        for parameter in self._parameters:
            if parameter.kind is Parameter.VAR_KEYWORD:
                named = {**available, **named}
            elif parameter.name in available:
                value = available.pop(parameter.name)
                if parameter.kind is Parameter.POSITIONAL_ONLY:
                    positional.append(value)
                else:
                    named[parameter.name] = value
            elif parameter.default is Parameter.empty and parameter.kind is not Parameter.VAR_POSITIONAL:
                raise self._missing(parameter.name, columns)
        # Copies, so that a function that modifies a list does not change it for other sources or later calls.
        return own_copy(positional), own_copy(named)

    def _texts(self, responses: Responses) -> list[str]:
        """The `completions`; kedge's own functions only get the policy's last turn, without other turns."""
        if self._module.startswith("kedge_tasks.verify."):
            return responses.answers
        return responses.last_turns if self._is_ours else responses.completions

    def _check_settings(self) -> None:
        names = self.argument_names
        if names is not None and (unknown := sorted(set(self.settings) - set(names))):
            raise RewardError(f"{self.name} has no setting {unknown[0]!r}; it takes {', '.join(sorted(names))}")

    def _missing(self, parameter: str, columns: Collection[str]) -> RewardError:
        if parameter in SIDES and {each.name for each in self._parameters} >= {*SIDES}:
            return RewardError(f"{self.name} {COMPARES}")
        if parameter in OF_TRL:
            return RewardError(
                f"{self.name} takes {parameter!r}: in TRL {OF_TRL[parameter]}; remove it, or give it a default"
            )
        present = ", ".join(sorted(columns)) or "none"
        by_letters = {column.lower(): column for column in sorted(columns)}
        near = difflib.get_close_matches(parameter.lower(), by_letters, n=1, cutoff=0.75)
        meant = f"data.columns.{parameter}={by_letters[near[0]] if near else 'COLUMN'}"
        remedy = f"set {meant}, or" if near else f"add the column, name another one ({meant}), or"
        return RewardError(
            f"{self.name} takes {parameter!r}, but no column of the prompts has that name (columns: {present}); "
            f"{remedy} set the parameter's value"
        )


def given_columns(columns: Mapping[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
    """Rename columns that clash with `RESERVED_ARGUMENTS`."""
    names = free_names(columns, RESERVED_ARGUMENTS)
    return {names[column]: entries for column, entries in columns.items()}


def _filled(rows: Sequence[int], scores: Sequence[Score], count: int) -> list[Score]:
    """Expand the scores of some rows to all rows, with None for the others."""
    known = dict(zip(rows, scores, strict=True))
    return [known.get(row) for row in range(count)]


def name_of(function: object) -> str:
    """The name of a function, or of another callable object, as a term of the reward."""
    if not callable(function):
        raise RewardError(f"a reward function must be callable; {function!r} is of type {type(function).__name__}")
    inner = _inner(function)
    return str(getattr(inner, "__name__", type(inner).__name__)).strip("<>")


def _inner(function: object) -> object:
    return function.func if isinstance(function, partial) else function


def _parameters(function: Callable[..., Any], name: str) -> list[Parameter]:
    """Return the function's parameters, after checking that they accept the responses."""
    try:
        # A torch module's `__call__` takes any arguments and passes them on to `forward`.
        parameters = list(inspect.signature(getattr(function, "forward", function)).parameters.values())
    except (TypeError, ValueError) as error:
        raise RewardError(f"{name} has no signature; wrap it in f(prompts, completions, **columns)") from error
    takes_any = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters)
    if not takes_any and not any(parameter.name in RESPONSE_ARGUMENTS for parameter in parameters):
        if {parameter.name for parameter in parameters} >= {*SIDES}:
            raise RewardError(f"{name} {COMPARES}")
        shown = ", ".join(str(parameter) for parameter in parameters)
        of_model = "; a transformers classifier is passed as kedge.LoadedModel(model, tokenizer)"
        raise RewardError(
            f"{name}({shown}) does not take `completions`; expected f(prompts, completions, **columns)"
            f"{of_model if hasattr(function, 'forward') else ''}"
        )
    return parameters


@contextmanager
def _one_line_errors(name: str) -> Iterator[None]:
    """Convert any exception of user code into one line with the function's name and the location.

    The location of a `RewardError` is left out, since the function raised it to explain a mistake.
    """
    try:
        yield
    except RunEnded:
        raise
    except RewardError as error:
        kind = LastingRewardError if isinstance(error, LastingRewardError) else RewardError
        raise kind(f"{name}: {str(error).removeprefix(f'{name}: ')}") from error
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        text = typed_error_text(error)
        hint = AS_TEXT if re.search(r"string ind|'str' object has no attribute '(get|content|role)'", text) else ""
        raise RewardError(f"{name} raised {text} ({place_of(error)}){hint}") from error


def load_function(spec: str) -> Callable[..., Any]:
    """Load the reward function of a given name; see `find_named`.

    Raises:
        RewardError: No such function, or it does not take `completions`.
    """
    function = find_function(spec)
    FunctionReward(function)  # checks its signature now, not after the first rollout
    return function


def find_function(spec: str) -> Callable[..., Any]:
    """Find the function of a given name, with any signature; see `find_named`.

    Raises:
        RewardError: No such file, module or function; the import raised; it is not callable.
    """
    return find_named(spec, word="reward", error=RewardError)
