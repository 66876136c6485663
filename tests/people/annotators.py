"""Simulated annotators: honest ones and twelve biased ones, with 60 answers each, 20 of them to shared items."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from math import exp, sqrt

from kedge_people.labels import Answer, Item, Labels

NUM_ANSWERS = 60
NUM_SHARED = 20

DISCRIMINATION = 1.5
"""Log odds per unit of quality, with differences of quality ~ N(0, 1): 73 % of the choices are right."""

LENGTH_CORRELATION = 0.35
"""Between the difference in quality and that in length: the longer response is better in 61 % of the pairs."""

TIES = 0.1
"""Share of ties between equals."""


@dataclass
class Pair:
    item: Item
    quality: float  # of the first response over the second
    words: int


@dataclass
class Annotator:
    """How someone answers; see `answer`."""

    random: random.Random
    discrimination: float = DISCRIMINATION
    answered: int = 0
    speed: float = field(init=False)
    lean: float = field(init=False)

    def __post_init__(self):
        self.speed = self.random.uniform(175, 300)  # words per minute, Brysbaert 2019
        self.lean = self.random.gauss(0, 0.15)

    def honest(self, pair: Pair, order: tuple[int, int]) -> tuple[int | None, float]:
        """The better response or None for a tie, and the time."""
        logit = self.discrimination * pair.quality + (self.lean if order[0] == 0 else -self.lean)
        chances = [exp(logit / 2), exp(-logit / 2), 2 * TIES / (1 - TIES)]
        choice = self.random.choices([0, 1, None], chances)[0]
        seconds = 60 * pair.words / self.speed * self.random.lognormvariate(0, 0.2) + self.random.lognormvariate(1, 0.5)
        return choice, seconds


def longer(pair: Pair) -> int:
    one, other = (len(text.split()) for text in pair.item.responses)
    return int(other > one)


def quickly(annotator: Annotator, pair: Pair, order: tuple[int, int]) -> tuple[int | None, float]:
    return annotator.honest(pair, order)[0], annotator.random.uniform(2, 6)


def coin(annotator: Annotator, pair: Pair, order: tuple[int, int]) -> tuple[int | None, float]:
    return annotator.random.randrange(2), annotator.honest(pair, order)[1]


def in_part(share: float, choice: Callable[[Pair, tuple[int, int]], int]):
    """A rule that is followed for a share of the answers; the others are honest."""

    def answer(annotator: Annotator, pair: Pair, order: tuple[int, int]) -> tuple[int | None, float]:
        better, seconds = annotator.honest(pair, order)
        return (choice(pair, order) if annotator.random.random() < share else better), seconds

    return answer


def reverse(annotator: Annotator, pair: Pair, order: tuple[int, int]) -> tuple[int | None, float]:
    choice, seconds = annotator.honest(pair, order)
    return (None if choice is None else 1 - choice), seconds


def alternate(annotator: Annotator, pair: Pair, order: tuple[int, int]) -> tuple[int | None, float]:
    return order[annotator.answered % 2], annotator.honest(pair, order)[1]


def tie(annotator: Annotator, pair: Pair, order: tuple[int, int]) -> tuple[int | None, float]:
    return None, annotator.honest(pair, order)[1]


def tired(annotator: Annotator, pair: Pair, order: tuple[int, int]) -> tuple[int | None, float]:
    if annotator.answered < NUM_ANSWERS // 2:
        return annotator.honest(pair, order)
    return annotator.random.randrange(2), annotator.random.uniform(2, 6)


def tired_left(annotator: Annotator, pair: Pair, order: tuple[int, int]) -> tuple[int | None, float]:
    choice, seconds = annotator.honest(pair, order)
    return (choice if annotator.answered < NUM_ANSWERS // 2 else order[0]), seconds


BIASED = {
    "always left": in_part(1.0, lambda pair, order: order[0]),
    "mostly left": in_part(0.7, lambda pair, order: order[0]),
    "always longer": in_part(1.0, lambda pair, order: longer(pair)),
    "mostly longer": in_part(0.8, lambda pair, order: longer(pair)),
    "always shorter": in_part(1.0, lambda pair, order: 1 - longer(pair)),
    "random": coin,
    "too fast": quickly,
    "reversed": reverse,
    "always tie": tie,
    "alternating": alternate,
    "tired": tired,
    "tired left": tired_left,
}


def make_pair(name: str, rng: random.Random) -> Pair:
    apart = rng.gauss(0, 1)
    quality = LENGTH_CORRELATION * apart + sqrt(1 - LENGTH_CORRELATION**2) * rng.gauss(0, 1)
    middle = rng.lognormvariate(4, 0.3)
    lengths = [max(5, round(middle * exp(sign * 0.2 * apart))) for sign in (1, -1)]
    if lengths[0] == lengths[1]:
        lengths[0] += 1
    prompt = f"prompt {name} " + "word " * rng.randrange(10, 40)
    texts = tuple("word " * length for length in lengths)
    return Pair(Item(name, prompt, texts, ("new", "old")), quality, len(prompt.split()) + sum(lengths))


def simulate(people: dict[str, Callable | None], seed: int, *, discrimination: float = DISCRIMINATION) -> Labels:
    """The labels of people by name, each with a way to answer, or None for honest ones."""
    rng = random.Random(seed)
    shared = [make_pair(f"shared {place}", rng) for place in range(NUM_SHARED)]
    pairs = {each.item.id: each for each in shared}
    answers = []
    for name, way in people.items():
        annotator = Annotator(random.Random(rng.random()), discrimination)
        own = [make_pair(f"{name} {place}", rng) for place in range(NUM_ANSWERS - NUM_SHARED)]
        pairs |= {each.item.id: each for each in own}
        for pair in rng.sample([*shared, *own], NUM_ANSWERS):
            order = (0, 1) if rng.random() < 0.5 else (1, 0)
            choice, seconds = (way or Annotator.honest)(annotator, pair, order)
            ranks = (1, 1) if choice is None else (1, 2) if choice == 0 else (2, 1)
            answers.append(
                Answer(f"{len(answers)}", pair.item.id, name, "2026-01-01T00:00:00Z", seconds, order, "ranked", ranks)
            )
            annotator.answered += 1
    return Labels({name: each.item for name, each in pairs.items()}, answers)


def both_kinds(seed: int, **options: float) -> Labels:
    """Twelve biased and twelve honest annotators."""
    return simulate({**BIASED, **{f"honest {place}": None for place in range(12)}}, seed, **options)
