"""The two kinds of environments, both duck-typed, plain or async, and their common interface.

A game or simulator:

    class Guess:
        def reset(self, row, seed):             # what opens the episode, after the row's prompt: messages or a text
            self.secret = random.Random(seed).randint(1, 10)
            return "Guess a number from 1 to 10."

        def step(self, text):                   # what the policy said
            guess = int(text)
            return Step(f"Not {guess}.", reward=float(guess == self.secret), terminated=guess == self.secret)

A class with tools, as in TRL: each public method with type hints and a docstring is a tool.

    class Calculator:
        def reset(self, **row):                 # a text is added to the prompt
            self.answer = row["answer"]

        def add(self, a: float, b: float) -> float:
            '''Add two numbers.

Args:
                a: The first number.
                b: The second number.
            '''
            return a + b

        def get_reward(self) -> float: ...

An instance plays one episode at a time, and is `reset` for the next; without `reset`, each episode gets a new instance.

Both may have a method `privileged()`, called after `reset`: it returns a mapping, such as {"secret": 7}, of privileged
information: a critic may read it, the policy does not.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from kedge_base.environment_turn import Ending, EnvironmentTurn
from kedge_base.errors import EnvError, RunEnded
from kedge_tasks.environments.tools import Tools

LARGEST = 1e12
"""Largest reward: sums and squares of larger ones overflow in single precision."""
LONGEST_TEXT = 1_000_000
"""Maximum characters of a message: longer ones are a mistake, and would not fit into any context."""


@dataclass(frozen=True)
class Step:
    """A game's reply to a turn of the policy.

    Attributes:
        messages: The answer: a text, which a user says, or messages with `role` and `content`.
        reward: The reward of this turn.
        terminated: The episode is over.
        truncated: The episode is cut off here, for example by a limit of steps, so the state has a nonzero value.
        context: What the policy reads next instead of all that it has read so far, such as a summary: messages, or a
            text, which a user says. `messages` follow it.
    """

    messages: Any = ()
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    context: Any = None


class Game:
    """An environment with `reset(row, seed)` and `step(text)`.

    Args:
        environment: The user's object.
        name: Its name in errors.
    """

    tools = None
    has_reset = True

    def __init__(self, environment: Any, name: str) -> None:
        self._environment = environment
        self._name = name

    @property
    def is_async(self) -> bool:
        """True if a method is declared with `async def`."""
        return _is_async(self._environment, ("reset", "step", "privileged"))

    async def open(self, row: Mapping[str, Any], seed: int) -> EnvironmentTurn:
        """Start an episode; return the messages that follow the row's prompt."""
        reset = self._environment.reset
        opening = reset(**accepted(reset, {"row": row, "seed": seed}))
        return await _opened(opening, self._environment, self._name)

    async def step(self, text: str, **_: Any) -> EnvironmentTurn:
        """Pass on the policy's text; return the environment's reply."""
        step = _as_step(await _result(self._environment.step(text)), self._name)
        reward = finite_number(step.reward, f"{self._name}.step gave the reward")
        terminated, truncated = (
            _flag(getattr(step, key), f"{self._name}.step gave {key}=") for key in ("terminated", "truncated")
        )
        ending: Ending | None = "completed" if terminated else "truncated" if truncated else None
        messages = _messages(step.messages, self._name)
        if step.context is None:
            return EnvironmentTurn(messages, reward, ending)
        context = _messages(step.context, self._name, roles=("user", "tool", "system", "assistant"))
        return EnvironmentTurn([], reward, ending, context=[*context, *messages])

    async def finish(self) -> EnvironmentTurn:
        """End the episode early, without a reward beyond those of its turns."""
        return EnvironmentTurn(ending="completed")


class ToolUser:
    """An environment with tools: an episode ends with the first turn that calls none.

    Args:
        environment: The user's object.
        name: Its name in errors.
        tools: Its tools.
    """

    def __init__(self, environment: Any, name: str, tools: Tools) -> None:
        self._environment = environment
        self._name = name
        self.tools = tools

    @property
    def has_reset(self) -> bool:
        """True if an instance can play another episode."""
        return callable(getattr(self._environment, "reset", None))

    @property
    def is_async(self) -> bool:
        """See `Game`."""
        return _is_async(self._environment, ("reset", "get_reward", "privileged", *self.tools.names))

    @property
    def is_scored(self) -> bool:
        """True if it rewards its episodes."""
        return hasattr(self._environment, "get_reward")

    async def open(self, row: Mapping[str, Any], seed: int) -> EnvironmentTurn:
        """Start an episode; return the messages that follow the row's prompt."""
        opening = None
        if self.has_reset:
            reset = self._environment.reset
            given = accepted(reset, {"seed": seed, **row})
            _check_call(reset, f"{self._name}.reset", f"arguments named seed, {', '.join(map(str, row))}", **given)
            opening = reset(**given)
        return await _opened(opening, self._environment, self._name)

    async def step(self, text: str, **_: Any) -> EnvironmentTurn:
        """Make the tool calls in the policy's text; return their results."""
        calls = self.tools.calls_in(text)
        if not calls:
            return await self.finish()
        messages: list[dict[str, str]] = []
        errors = 0
        for call in calls:
            try:
                content = as_text(await _result(self.tools.call(self._environment, call)))
            except RunEnded:
                raise
            except (Exception, SystemExit) as error:  # a tool may raise anything; the policy reads what went wrong
                errors += 1
                content = f"Error: {str(error) or type(error).__name__}"
            messages.append({"role": "tool", "name": call.name, "content": _encodable(content[:LONGEST_TEXT])})
        return EnvironmentTurn(messages, num_calls=len(calls), num_errors=errors)

    async def finish(self) -> EnvironmentTurn:
        """End the episode with its reward; 0 without `get_reward`."""
        if not self.is_scored:
            return EnvironmentTurn(ending="completed")
        reward = finite_number(await _result(self._environment.get_reward()), f"{self._name}.get_reward gave")
        return EnvironmentTurn(reward=reward, ending="completed")


def adapter_of(kind: Callable[[], Any], name: str) -> Callable[[], Game | ToolUser]:
    """Return a function that makes environments of a class, wrapped in the common interface.

    Args:
        kind: A class without arguments, or a function that makes an environment.
        name: Its name in errors.

    Raises:
        EnvError: It has neither `step` nor a tool, needs arguments, or has methods that accept others than kedge's.
    """
    if not callable(kind):
        raise EnvError(f"{name} is an object; expected its class, or a function that makes one for each episode")
    try:
        environment = kind()
    except TypeError as error:
        raise EnvError(f"{name} cannot be made without arguments: {error}") from error
    first = [environment]

    def made() -> Any:
        return first.pop() if first else kind()

    if callable(getattr(environment, "step", None)):
        if not callable(getattr(environment, "reset", None)):
            raise EnvError(f"{name} has step, and no reset; expected reset(row, seed) and step(text)")
        expected = "reset(row, seed) and step(text)"
        with suppress(ValueError):  # implemented in C, without a signature
            _check_call(environment.step, name, expected, "")
            _check_call(environment.reset, name, expected, **accepted(environment.reset, {"row": {}, "seed": 0}))
        return lambda: Game(made(), name)
    tools = Tools.of(environment, name)
    return lambda: ToolUser(made(), name, tools)


def _is_async(environment: Any, names: Sequence[str]) -> bool:
    return any(inspect.iscoroutinefunction(getattr(environment, name, None)) for name in names)


def _check_call(function: Callable[..., Any], name: str, expected: str, *values: Any, **named: Any) -> None:
    """Raise an `EnvError` that says what is expected, if a function does not accept these arguments."""
    try:
        inspect.signature(function).bind(*values, **named)
    except TypeError as error:
        raise EnvError(f"{name}: {error}; expected {expected}") from None


async def _opened(opening: Any, environment: Any, name: str) -> EnvironmentTurn:
    """The messages that `reset` returned, and the privileged information for a critic, if any."""
    messages = _messages(await _result(opening), name)
    if not hasattr(environment, "privileged"):
        return EnvironmentTurn(messages)
    found = await _result(environment.privileged())
    if not isinstance(found, Mapping):
        raise EnvError(f'{name}.privileged gave {found!r:.60}; expected a mapping, such as {{"secret": 7}}')
    privileged = {str(key): _plain(value) for key, value in cast("Mapping[Any, Any]", found).items()}
    return EnvironmentTurn(messages, privileged=privileged)


def _plain(value: Any) -> Any:
    """Convert a value to JSON types, which can be sent to another process: arrays to lists, other types to texts."""
    return json.loads(
        json.dumps(value, default=lambda entry: entry.tolist() if hasattr(entry, "tolist") else str(entry))
    )


async def _result(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def accepted(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Select the arguments that a function accepts."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(arguments)
    return {name: value for name, value in arguments.items() if name in parameters}


def _as_step(value: Any, name: str) -> Step:
    """Convert an object with a step's attributes, a mapping, or a tuple as in Gymnasium or Gym to a step."""
    if isinstance(value, (tuple, list)) and 4 <= len(value) <= 5:
        if len(value) == 4 and isinstance(value[3], Mapping):  # Gym's, before Gymnasium
            was_cut = value[3].get("TimeLimit.truncated", False)
            return Step(value[0], value[1], False if was_cut else value[2], was_cut)
        return Step(*value[:4])
    names = (*Step.__annotations__, "observation", "done")  # the last two as in OpenEnv
    given = value if isinstance(value, Mapping) else {key: getattr(value, key) for key in names if hasattr(value, key)}
    found = dict(cast("Mapping[str, Any]", given))
    if "observation" in found:
        found.setdefault("messages", found.pop("observation"))
    if "done" in found:  # also set for a truncated episode
        is_done = found.pop("done")
        found.setdefault("terminated", False if found.get("truncated") else is_done)
    known = {key: found[key] for key in Step.__annotations__ if found.get(key) is not None}
    if not known or not set(found) <= set(Step.__annotations__):
        raise EnvError(
            f"{name}.step returned {value!r:.60} (of type {type(value).__name__}); expected a kedge.Step, or messages, "
            "reward, terminated and truncated"
        )
    return Step(**cast("dict[str, Any]", known))


def _messages(value: Any, name: str, roles: Sequence[str] = ("user", "tool", "system")) -> list[dict[str, str]]:
    """Convert an environment's reply to messages: None, a text, or one or several messages with some roles."""
    if value is None or (isinstance(value, str) and not value):
        return []
    entries = [{"role": "user", "content": value}] if isinstance(value, str) else value
    entries = [entries] if isinstance(entries, Mapping) else entries
    if not isinstance(entries, Sequence):
        raise EnvError(f"{name} said {value!r:.60} (of type {type(value).__name__}); expected a text, or messages")
    messages: list[dict[str, str]] = []
    for entry in entries:
        if not isinstance(entry, Mapping) or not {"role", "content"} <= set(entry):
            raise EnvError(f"{name} gave the message {entry!r:.60}; expected one with role and content")
        role, content = entry["role"], entry["content"]
        if role not in roles or not isinstance(content, str):
            expected = f"{', '.join(roles[:-1])} or {roles[-1]}"
            raise EnvError(f"{name} gave the message {entry!r:.60}; expected the role {expected}, and a text")
        if len(content) > LONGEST_TEXT:
            raise EnvError(f"{name} gave a message of {len(content):,} characters; at most {LONGEST_TEXT:,}")
        messages.append({"role": role, "content": _encodable(content)})
    return messages


def _encodable(text: str) -> str:
    """Replace lone surrogates, which no tokenizer accepts."""
    return text.encode("utf-8", "replace").decode()


def _flag(value: Any, giver: str) -> bool:
    """Convert a truth value; reject anything else, such as the `info` of an old Gym tuple."""
    try:
        return {0: False, 1: True}[value.item() if hasattr(value, "item") else value]
    except (KeyError, TypeError, ValueError, RuntimeError):
        raise EnvError(f"{giver}{value!r:.60}; expected True or False") from None


def finite_number(value: Any, giver: str) -> float:
    """Convert a number; raise an `EnvError` that starts with `giver` for anything else."""
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) <= LARGEST:
        raise EnvError(f"{giver} {value!r:.60}; expected a finite number")
    return number


def as_text(value: Any) -> str:
    """Convert a tool's result to text: JSON, unless it is already text."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(value)
