"""Code shared by the verifiers: reading rows, verdicts on a batch, and a time limit per response."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from inspect import Parameter, signature
from typing import Any, TypeAlias, TypeVar, cast

from kedge_base.errors import KedgeError, RewardError
from kedge_base.texts import shortened
from kedge_base.thoughts import answer_of, opened_thought
from kedge_base.verdict import Verdict, reads

RIGHT = "right"
PARTLY = "partly right"
NO_ANSWER = "no answer found"
CUT_OFF = "cut off"
TOO_SLOW = "took too long"
WRONG_FORMAT = "wrong format"
WRONG_VALUE = "wrong value"

SECONDS = 1.0
"""CPU seconds for one response; milliseconds are usual."""

AGAIN = 0.05
"""Seconds after which an expired limit interrupts again: libraries may catch the first interruption."""

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Reference = TypeVar("_Reference")

Graded: TypeAlias = "str | tuple[str, str] | Verdict"
"""The grade of an answer: the reason, with or without the compared answer, or a verdict for a score between 0 and 1."""


def verifier(check: Callable[..., Any]) -> Callable[[_Function], _Function]:
    """Let TRL's trainers also call a function of `completions`, some columns and settings.

    Args:
        check: See `reads`.
    """

    def decorate(function: _Function) -> _Function:
        @wraps(function)  # kedge reads the columns and settings from the function's own signature
        def verify(*args: Any, **arguments: Any) -> list[Any]:
            if "completion_ids" in arguments:  # TRL passes everything, kedge only what the function names
                return _called_by_trl(function, **arguments)
            return function(*args, **arguments)

        return cast("_Function", reads(check)(verify))

    return decorate


def _called_by_trl(
    function: Callable[..., list[Verdict]],
    prompts: Sequence[Any],
    completions: Sequence[Any],
    **arguments: Any,
) -> list[Verdict | None]:
    """Score a call from TRL, which passes texts or messages and all columns; None for a row that lacks a needed column.

    Source: TRL 1.16, `GRPOTrainer._calculate_rewards`.
    """
    parameters = signature(function).parameters
    opened = [_last_message(prompt if isinstance(prompt, str) else prompt[-1:]) for prompt in prompts]
    texts = [_last_message(completion) for completion in completions]
    if "prompts" in parameters:
        arguments["prompts"] = opened
    else:
        texts = [opened_thought(prompt) + text for prompt, text in zip(opened, texts, strict=True)]
    arguments = {"completions": texts, **{name: value for name, value in arguments.items() if name in parameters}}
    columns = {name for name in arguments if parameters[name].kind is not Parameter.KEYWORD_ONLY}  # not settings
    needed = [arguments[name] for name in columns if parameters[name].default is Parameter.empty]
    rows = [row for row in range(len(texts)) if all(entries[row] is not None for entries in needed)]
    chosen = {name: [value[row] for row in rows] if name in columns else value for name, value in arguments.items()}
    scores = dict(zip(rows, function(**chosen), strict=True)) if rows else {}
    return [scores.get(row) for row in range(len(texts))]


def _last_message(turns: Any) -> str:
    """Return a text, or the text of the assistant's last message, whose content may be a list of parts."""
    if isinstance(turns, str):
        return turns
    last = next((message for message in reversed(turns) if message.get("role", "assistant") == "assistant"), {})
    content = last.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text") or "" for part in content)


def read_rows(
    column: str, entries: Sequence[Any], read: Callable[..., _Reference], *others: Sequence[Any] | None
) -> list[_Reference]:
    """Read each row's entry of a column.

    Args:
        column: The column's name.
        entries: Its entries.
        read: Reads one entry together with the row's other columns; raises `ValueError` with what it expects instead.
        others: The other columns; None for one that is missing.

    Raises:
        RewardError: An entry cannot be read.
    """
    found = []
    given = [each or [None] * len(entries) for each in others]
    for row, (entry, *more) in enumerate(zip(entries, *given, strict=True), start=1):
        try:
            found.append(read(entry, *more))
        except ValueError as error:
            shown = "a number of thousands of digits"
            with suppress(ValueError):  # Python refuses to print it
                shown = " ".join(repr(entry).split())
            shown = shortened(shown, 80)
            raise RewardError(f"column {column!r}, prompt {row}: {shown} is not usable; expected {error}") from error
    return found


def decoded(entry: object) -> object:
    """Parse a list or mapping written as JSON, as in a cell of a CSV file; return any other entry unchanged."""
    if isinstance(entry, str) and entry.lstrip().startswith(("[", "{")):
        with suppress(ValueError, RecursionError):
            return json.loads(entry)
    return entry


def json_value(text: str) -> Any:
    """Parse JSON as its standard defines it: without the NaN and Infinity that Python also reads."""
    return json.loads(text, parse_constant=_no_constant)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def whole_response(text: str) -> tuple[str, bool]:
    """Return a response unchanged, for a verifier that finds the answer itself."""
    return text, False


def final_answer(text: str) -> tuple[str, bool] | None:
    """Return the text in the last `<answer>…</answer>` after the thoughts, or all text after them, and whether it was
    tagged.

    None if the last thought was not closed, since a thought is not an answer.
    """
    answer = answer_of(text)
    if answer is None:
        return None
    end = answer.rfind("</answer>")
    start = answer.rfind("<answer>", 0, max(end, 0))
    return (answer, False) if start < 0 else (answer[start + len("<answer>") : end], True)


def verdicts(
    completions: Sequence[str],
    stopped: Sequence[bool] | None,
    references: Sequence[_Reference],
    grade: Callable[[str, bool, _Reference], Graded],
    *,
    read: Callable[[str], tuple[str, bool] | None] = final_answer,
) -> list[Verdict]:
    """A verdict per response: 1 if the reason is `right`, else 0, unless `grade` gives a verdict.

    Args:
        completions: The responses.
        stopped: Whether each ended with a stop token; None if all did.
        references: The rows' references.
        grade: Grades one answer, given its text, whether it is complete, and its reference. If it finds no answer in a
            truncated response, the reason becomes `cut off`.
        read: Finds the answer in a response, and whether it is complete even in a response that was cut off.
    """
    ended = [True] * len(completions) if stopped is None else stopped
    found = []
    for text, is_whole, reference in zip(completions, ended, references, strict=True):
        graded: Graded = NO_ANSWER
        try:
            if answer := read(text):
                graded = grade(answer[0], is_whole or answer[1], reference)
        except KedgeError:
            raise
        except Expired:
            graded = TOO_SLOW
        except Exception:  # from any library: one response must not end a run
            graded = WRONG_FORMAT
        if not isinstance(graded, Verdict):
            reason, answer_text = (graded, None) if isinstance(graded, str) else graded
            reason = CUT_OFF if reason == NO_ANSWER and not is_whole else reason
            graded = Verdict(float(reason == RIGHT), reason, answer_text)
        found.append(graded)
    return found


class Expired(BaseException):
    """The time limit has passed: a response `took too long`. Not an `Exception`: libraries catch those and continue."""


@contextmanager
def deadline(name: str, seconds: float = SECONDS) -> Iterator[None]:
    """Interrupt code that computes for too long.

    The limit counts the process's own processor time, so that verdicts do not depend on other load on the machine. Its
    timer is not the one of SIGALRM, which libraries and the worker process use.

    Args:
        name: The verifier.
        seconds: The limit, processor time.

    Raises:
        Expired: The limit has passed.
        RewardError: This is not the main thread, the only one that can be interrupted, or the system has no such timer.
    """
    if not hasattr(signal, "setitimer"):
        raise RewardError(f"{name} needs timers for its time limit; Linux and macOS have them")
    if threading.current_thread() is not threading.main_thread():
        raise RewardError(
            f"{name} needs the main thread for its time limit: pass its name, 'kedge_tasks.verify:{name}', so that "
            "it runs in a separate process"
        )
    has_expired = False

    def expire(*_: object) -> None:
        nonlocal has_expired
        has_expired = True
        raise Expired

    previous = signal.signal(signal.SIGVTALRM, expire)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds, AGAIN)
        yield
    finally:
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        finally:  # also if the limit expires right here
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, previous)
    if has_expired:
        raise Expired
