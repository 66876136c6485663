"""Length and format penalties as plain reward functions: 0 for a good response, negative for a bad one.

Combine them with the main reward by weight, for example `kedge.rewards.penalties:too_long`. Their settings are checked
before a run starts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from kedge.data.fields import number_of
from kedge.data.records import RowError
from kedge_base.errors import RewardError
from kedge_base.verdict import reads


def _check_window(window: float = 0.2) -> None:
    if not 0 < window <= 1:
        raise RewardError(f"too_long: window {window} is not in (0, 1]")


@reads(_check_window)
def too_long(completion_ids: list[list[int]], max_new_tokens: int, *, window: float = 0.2) -> list[float]:
    """A soft penalty that grows linearly as a response approaches the length limit.

    penalty(n) = 0                          if n ≤ max − w
                 (max − w − n) / w          if max − w < n ≤ max
                 −1                         if n > max,          w = window · max

    Args:
        completion_ids: Responses in tokens, including the stop token.
        max_new_tokens: The length limit, tokens.
        window: Width of the penalized range as a fraction of the limit, in (0, 1]. The paper has 0.2: 4,096 of 20,480.

    Raises:
        RewardError: A window outside (0, 1].

    Source: DAPO (arXiv 2503.14476), eq. 13; spec §5.24.
    """
    _check_window(window)
    width = window * max_new_tokens
    return [max(-1.0, min(0.0, (max_new_tokens - width - len(ids)) / width)) for ids in completion_ids]


def _check_target(target: float, tolerance: float = 0.2) -> None:
    _read_targets([target], tolerance)


def _read_targets(target_length: Sequence[Any], tolerance: float = 0.2) -> list[float]:
    if not tolerance >= 0:
        raise RewardError(f"the tolerance of a length, {tolerance!r}, must be 0 or more")
    return [_target(each) for each in target_length]


def _target(value: object) -> float:
    with suppress(RowError):
        if (number := number_of(value, "target_length")) > 0:
            return number
    raise RewardError(f"the target of a length, {value!r}, must be a number of tokens above 0")


@reads(_check_target)
def off_length(completion_ids: list[list[int]], *, target: float, tolerance: float = 0.2) -> list[float]:
    """A penalty for responses much shorter or longer than a target.

    penalty(n) = −min(1, max(0, |n − target| − tolerance · target) / target)

    Args:
        completion_ids: Responses in tokens, including the stop token.
        target: The wanted length, tokens, > 0.
        tolerance: Deviation without a penalty, as a fraction of the target, ≥ 0.

    Raises:
        RewardError: A target of 0 or less, or a negative tolerance.
    """
    return off_target_length(completion_ids, [target] * len(completion_ids), tolerance=tolerance)


@reads(_read_targets)
def off_target_length(
    completion_ids: list[list[int]], target_length: list[float], *, tolerance: float = 0.2
) -> list[float]:
    """`off_length` with a target per prompt, from the column `target_length` of the data.

    Raises:
        RewardError: A target that is not a number above 0, or a negative tolerance.

    Source: LCPO's length reward, made relative to the target (L1, arXiv 2503.04697).
    """
    targets = _read_targets(target_length, tolerance)
    deviations = (abs(len(ids) - target) / target for ids, target in zip(completion_ids, targets, strict=True))
    return [-min(1.0, max(0.0, deviation - tolerance)) for deviation in deviations]


def unfinished(stopped: list[bool]) -> list[float]:
    """−1 for a response cut off before its stop token (added to the score, unlike `rollout.missing_eos_score`)."""
    return [0.0 if done else -1.0 for done in stopped]


def blank(completions: list[str]) -> list[float]:
    """−1 for a response without a visible character."""
    return [0.0 if text.strip() else -1.0 for text in completions]


def _check_size(size: int = 3) -> None:
    if not isinstance(size, int) or size < 1:
        raise RewardError(f"repetitive: size {size!r} is not a whole number, at least 1")


@reads(_check_size)
def repetitive(completions: list[str], *, size: int = 3) -> list[float]:
    """Minus the fraction of a response's word n-grams that repeat an earlier one.

    penalty = distinct n-grams / n-grams − 1,   in (−1, 0]

    Args:
        completions: Responses as text.
        size: Words per n-gram, ≥ 1.

    Raises:
        RewardError: A size that is not a whole number, or below 1.
    """
    _check_size(size)
    return [_distinct_fraction(text.split(), size) - 1 for text in completions]


def _expression(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise RewardError(f"ill_formed: pattern {pattern!r} is not a regular expression: {error}") from error


@reads(_expression)
def ill_formed(completions: list[str], *, pattern: str) -> list[float]:
    """−1 for a response that a regular expression does not match in full (`.` also matches newlines).

    Raises:
        RewardError: The pattern is not a regular expression.
    """
    expression = _expression(pattern)
    return [0.0 if expression.fullmatch(text) else -1.0 for text in completions]


def _distinct_fraction(words: list[str], size: int) -> float:
    grams = [tuple(words[start : start + size]) for start in range(len(words) - size + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0
