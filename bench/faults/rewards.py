"""Faulty reward functions, for the doctor to detect. They run in worker processes and load nothing."""

from __future__ import annotations

import math
import random
import time
import zlib


def by_prompt(prompts: list[str], completions: list[str]) -> list[float]:
    """A score that depends on the prompt alone."""
    return [float(len(prompt) % 3) for prompt in prompts]


def arbitrary(prompts: list[str], completions: list[str]) -> list[float]:
    """Words count for half of the prompts and against the other half: nothing is to be learned for another prompt."""
    signs = [1.0 if zlib.crc32(prompt.encode()) % 2 else -1.0 for prompt in prompts]
    return [sign * len(text.split()) / 10 for sign, text in zip(signs, completions, strict=True)]


def faint(prompts: list[str], completions: list[str]) -> list[float]:
    """A valid reward, on half of the prompts a hundredth of it."""
    return [
        mark * (0.01 if len(prompt) % 2 else 1.0) for prompt, mark in zip(prompts, tuneful(completions), strict=True)
    ]


def constant(completions: list[str]) -> list[float]:
    """The same score for every response."""
    return [1.0] * len(completions)


def noise(completions: list[str], seed: int) -> list[float]:
    """A random number, independent of the response."""
    return [random.Random(f"{seed} {row}").gauss(0.0, 1.0) for row in range(len(completions))]


def long(completions: list[str]) -> list[float]:
    """Rewards length in words."""
    return [len(text.split()) / 5 for text in completions]


def short(completion_ids: list[list[int]]) -> list[float]:
    """Rewards brevity in tokens."""
    return [-len(ids) / 3 for ids in completion_ids]


def raising(completions: list[str]) -> list[float]:
    """Raises on responses that contain a certain word."""
    if any("Friday" in text for text in completions):
        raise KeyError("Friday")
    return tuneful(completions)


def dividing(completions: list[str]) -> list[float]:
    """Returns NaN on responses that contain a certain word, like a ratio with a zero denominator."""
    return [
        math.nan if "Easter" in text else mark for text, mark in zip(completions, tuneful(completions), strict=True)
    ]


def first_alone(prompts: list[str], completions: list[str]) -> list[float | None]:
    """Scores only the first response to each prompt."""
    marks = tuneful(completions)
    return [None if prompt in prompts[:row] else marks[row] for row, prompt in enumerate(prompts)]


def picky(completions: list[str]) -> list[float | None]:
    """Scores only responses without a certain letter pair; the others get no score, as a function may choose."""
    return [None if "th" in text else mark for text, mark in zip(completions, tuneful(completions), strict=True)]


def repeating(completions: list[str]) -> list[float]:
    """Rewards repeated words, as a fraction of all words."""
    words = [text.split() for text in completions]
    return [10.0 * (1.0 - len(set(each)) / len(each)) if each else 0.0 for each in words]


def solved(completions: list[str]) -> list[float]:
    """The full score for any response that ends with a question mark."""
    return [1.0 if text.rstrip().endswith("?") else 0.0 for text in completions]


def slow(completions: list[str], *, seconds: float = 3.0) -> list[float]:
    """A valid reward, but slow, like a judge over the network."""
    time.sleep(seconds)
    return tuneful(completions)


def tuneful(completions: list[str]) -> list[float]:
    """Rewards up to four sentences, of which the last must be complete."""
    marks = [text.count(".") + text.count("?") for text in completions]
    return [
        min(count, 4) / 2 - (0.0 if text.rstrip().endswith((".", "?")) else 1.0)
        for count, text in zip(marks, completions, strict=True)
    ]
