"""A stand-in for the package reasoning-gym, with tasks that show what they are given."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any


@dataclass
class Settings:
    """Of every task here."""

    most: int = 9
    share: float = 0.5
    word: str = "plus"
    signs: tuple[str, ...] = ("+",)
    seed: int | None = None
    size: int = 500

    def validate(self) -> None:
        """Refuse what cannot be."""
        assert self.most > 0, "most must be positive"


class Sums:
    """The sum of a number and its place; an answer that is near is half right."""

    def __init__(self, config: Settings) -> None:
        self.config = config
        self.scored: list[str] = []

    def __len__(self) -> int:
        return self.config.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = (self.config.seed or 0) * 100 % self.config.most
        return {"question": f"{number} {self.config.word} {index}?", "answer": number + index, "metadata": {}}

    def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
        """1 for the answer, .5 for one beside it, .01 for others; fails for what is no number."""
        self.scored.append(answer)
        if answer == "forever":
            while True:
                pass
        apart = abs(int(answer) - entry["answer"])
        return {0: 1.0, 1: 0.5}.get(apart, 0.01)


class Drawn(Sums):
    """Draws its numbers as the package does."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = random.Random((self.config.seed or 0) + index).randrange(self.config.most)
        return {"question": f"{number} {self.config.word} 1?", "answer": number + 1, "metadata": {}}


class Evaluates(Sums):
    """Executes what it is given."""

    def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
        """1 for whatever can be executed."""
        self.scored.append(answer)
        return float(bool(eval(answer)))


TASKS = ("sums", "drawn", "countdown", "spiral_matrix", "game_of_life_halting", "simple_integration")


@contextmanager
def reasoning_gym() -> Iterator[None]:
    """Replace the package."""
    factory: Any = ModuleType("reasoning_gym.factory")
    evaluating = {"countdown", "spiral_matrix"}
    kinds = {"drawn": Drawn, **dict.fromkeys(evaluating, Evaluates)}
    factory.DATASETS = {name: (kinds.get(name, Sums), Settings) for name in TASKS}
    package: Any = ModuleType("reasoning_gym")
    package.factory = factory
    before = {name: sys.modules.get(name) for name in ("reasoning_gym", "reasoning_gym.factory")}
    sys.modules |= {"reasoning_gym": package, "reasoning_gym.factory": factory}
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
