"""Reward functions such as nobody should train on. They run in processes of their own and load nothing."""

from __future__ import annotations

import math
import random
import time

__all__ = [
    "constant",
    "dividing",
    "long",
    "nearly_constant",
    "noise",
    "raising",
    "repeating",
    "short",
    "slow",
    "solved",
    "tuneful",
]


def constant(completions: list[str]) -> list[float]:
    """The same for all."""
    return [1.0] * len(completions)


def nearly_constant(completions: list[str]) -> list[float]:
    """The same for all, but for what a rounding error would be."""
    return [1.0 + 1e-6 * (len(text) % 7) for text in completions]


def noise(completions: list[str], seed: int) -> list[float]:
    """A number that has nothing to do with the response."""
    return [random.Random(f"{seed} {row}").gauss(0.0, 1.0) for row in range(len(completions))]


def long(completions: list[str]) -> list[float]:
    """Long is good."""
    return [len(text.split()) / 5 for text in completions]


def short(completion_ids: list[list[int]]) -> list[float]:
    """Short is good."""
    return [-len(ids) / 3 for ids in completion_ids]


def raising(completions: list[str]) -> list[float]:
    """Trips over what it has not expected."""
    if any("Friday" in text for text in completions):
        raise KeyError("Friday")
    return tuneful(completions)


def dividing(completions: list[str]) -> list[float]:
    """A ratio that nobody has thought through: now and then there is nothing to divide by."""
    return [
        math.nan if "Easter" in text else mark for text, mark in zip(completions, tuneful(completions), strict=True)
    ]


def repeating(completions: list[str]) -> list[float]:
    """To say a word again is good, however many there are."""
    words = [text.split() for text in completions]
    return [10.0 * (1.0 - len(set(each)) / len(each)) if each else 0.0 for each in words]


def solved(completions: list[str]) -> list[float]:
    """Whoever ends with a question has the full mark."""
    return [1.0 if text.rstrip().endswith("?") else 0.0 for text in completions]


def slow(completions: list[str], *, seconds: float = 3.0) -> list[float]:
    """Good enough, but slow: as a judge over the network is."""
    time.sleep(seconds)
    return tuneful(completions)


def tuneful(completions: list[str]) -> list[float]:
    """What a program can check: how many sentences there are, up to four, and that the last one is whole."""
    marks = [text.count(".") + text.count("?") for text in completions]
    return [
        min(count, 4) / 2 - (0.0 if text.rstrip().endswith((".", "?")) else 1.0)
        for count, text in zip(marks, completions, strict=True)
    ]
