"""Scores answers to tasks of the package reasoning-gym, as the tasks do."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kedge_base.errors import DataError, RewardError
from kedge_base.generated import find_entry
from kedge_base.verdict import Verdict
from kedge_tasks.verify.checking import (
    NO_ANSWER,
    PARTLY,
    RIGHT,
    WRONG_FORMAT,
    WRONG_VALUE,
    Graded,
    deadline,
    read_rows,
    verdicts,
    verifier,
)

NOTHING = 0.1
"""The highest score that tasks give to an entirely wrong answer."""

LONGEST = 10_000
"""Maximum characters of an answer."""

HUGE = re.compile(r"[eE][+-]?\d{4}")
"""A number with thousands of digits, which takes forever to compute."""

REFUSED: Mapping[str, str] = {
    "composite": "it is made of other tasks: name one of these",
    "game_of_life_halting": "it accepts any text",
    **dict.fromkeys(
        ("intermediate_integration", "polynomial_multiplication", "simple_integration"),
        "it executes a response to score it",
    ),
}


def _is_arithmetic(answer: str) -> bool:
    """True for whole numbers combined by the four operations and parentheses."""
    return len(answer) <= 200 and re.fullmatch(r"(?!.*\*\s*\*)(?!.*\d{10})[\d+\-*/(). ]*", answer) is not None


def _is_literal(answer: str) -> bool:
    """True for a text without brackets, or a Python literal such as a list of numbers, texts and lists."""
    if "[" not in answer and "(" not in answer:
        return answer.isprintable() or "\n" in answer
    try:
        ast.literal_eval(answer)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


CHECKED: Mapping[str, Callable[[str], bool]] = {
    **dict.fromkeys(("countdown", "puzzle24"), _is_arithmetic),
    **dict.fromkeys(("binary_matrix", "n_queens", "spiral_matrix", "string_insertion"), _is_literal),
}
"""Tasks that evaluate a response as Python, with a check that the response is safe to evaluate."""


def _read(entry: object) -> tuple[str, Any, dict[str, Any]]:
    try:
        name, task, found = find_entry(str(entry))
    except DataError as error:
        raise ValueError(f"a row of the prompts reasoning-gym:NAME ({error})") from error
    if name in REFUSED:
        raise RewardError(f"reasoning-gym's {name} cannot be a reward: {REFUSED[name]}")
    return name, task, found


def _entries(entry: Sequence[Any]) -> list[tuple[str, Any, dict[str, Any]]]:
    return read_rows("entry", entry, _read)


@verifier(_entries)
def reasoning_gym(completions: list[str], entry: list[Any], stopped: list[bool] | None = None) -> list[Verdict]:
    """Score a response by its reasoning-gym task, from 0 to 1; tasks may give partial credit.

    The answer is the text in the last `<answer>…</answer>`, else the whole response.

    Args:
        completions: Responses as text.
        entry: The column of the rows of `--prompts reasoning-gym:NAME`.
        stopped: Whether each response ended with a stop token.

    Raises:
        RewardError: A row cannot be used.
    """
    return verdicts(completions, stopped, _entries(entry), _grade)


def _grade(text: str, is_whole: bool, reference: tuple[str, Any, dict[str, Any]]) -> Graded:
    name, task, entry = reference
    answer = text.strip()
    if not answer or not is_whole:
        return NO_ANSWER
    if len(answer) > LONGEST or HUGE.search(answer) or not CHECKED.get(name, bool)(answer):
        return WRONG_FORMAT
    with deadline("reasoning_gym"):
        score = min(1.0, max(0.0, float(task.score_answer(answer, entry))))
    return Verdict(score, RIGHT if score == 1 else PARTLY if score > NOTHING else WRONG_VALUE, answer)
