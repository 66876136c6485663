"""Length and format penalties, as plain reward functions: 0 where nothing is wrong, below 0 where something is.

Give them a weight beside the main reward, for example `kedge.rewards.penalties:too_long`.
"""

from __future__ import annotations

import re

from kedge.errors import RewardError

__all__ = ["blank", "ill_formed", "repetitive", "too_long", "unfinished"]


def too_long(completion_ids: list[list[int]], max_new_tokens: int, *, window: float = 0.2) -> list[float]:
    """A soft penalty that grows over the last stretch before the length limit.

    penalty(n) = 0                          if n ≤ max − w
                 (max − w − n) / w          if max − w < n ≤ max
                 −1                         if n > max,          w = window · max

    Args:
        completion_ids: Responses in tokens, stop token included.
        max_new_tokens: The length limit, tokens.
        window: Width of the stretch, as a share of the limit, in (0, 1]; 0.2 is the published 4,096 of 20,480.

    Raises:
        RewardError: A window outside (0, 1].

    Source: DAPO (arXiv 2503.14476), eq. 13; spec §5.24.
    """
    if not 0 < window <= 1:
        raise RewardError(f"too_long: window {window} is not in (0, 1]")
    width = window * max_new_tokens
    return [max(-1.0, min(0.0, (max_new_tokens - width - len(ids)) / width)) for ids in completion_ids]


def unfinished(stopped: list[bool]) -> list[float]:
    """−1 for a response that was cut before its stop token (an addition to the score, unlike the EOS trick)."""
    return [0.0 if done else -1.0 for done in stopped]


def blank(completions: list[str]) -> list[float]:
    """−1 for a response without a visible character."""
    return [0.0 if text.strip() else -1.0 for text in completions]


def repetitive(completions: list[str], *, size: int = 3) -> list[float]:
    """Minus the share of a response's word n-grams that occurred in it before.

    penalty = distinct n-grams / n-grams − 1,   in (−1, 0]

    Args:
        completions: Responses as text.
        size: Words per n-gram, ≥ 1.

    Raises:
        RewardError: A size below 1.
    """
    if size < 1:
        raise RewardError(f"repetitive: size {size} is below 1")
    return [_distinct_share(text.split(), size) - 1 for text in completions]


def ill_formed(completions: list[str], *, pattern: str) -> list[float]:
    """−1 for a response that a regular expression does not match in full (`.` matches line ends too).

    Args:
        completions: Responses as text.
        pattern: What a well-formed response looks like.

    Raises:
        RewardError: The pattern is not a regular expression.
    """
    try:
        expression = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise RewardError(f"ill_formed: pattern {pattern!r} is not a regular expression: {error}") from error
    return [0.0 if expression.fullmatch(text) else -1.0 for text in completions]


def _distinct_share(words: list[str], size: int) -> float:
    grams = [tuple(words[start : start + size]) for start in range(len(words) - size + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0
