"""Forum posts: the facts of a story, spread over paragraphs with irrelevant sentences."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from kedge.stages.demo.world.words import (
    BYSTANDERS,
    CORE_SLOTS,
    LEXICON,
    OPENINGS,
    OPTIONAL_SLOTS,
    POSTSCRIPTS,
    RAMBLINGS,
    SUBREDDITS,
    TELLINGS,
    TITLES,
)

__all__ = ["Post", "write_post"]

ABSENT_RATE: Final = 0.12
"""Probability that an optional fact is missing from a story."""
OPENING_RATE: Final = 0.4
BYSTANDER_RATE: Final = 0.25
LONG_RATE: Final = 0.12
MIDDLE_SLOTS: Final = ("place", "time", "reason")
LAST_SLOTS: Final = ("demand", "feeling", "question")


@dataclass(frozen=True)
class Post:
    """A post and its key facts, which the text does not mark.

    `index` is the number of the post in its world; `facts` maps a slot of the story to its value.
    """

    index: int
    subreddit: str
    title: str
    paragraphs: tuple[str, ...]
    facts: Mapping[str, str]

    @property
    def text(self) -> str:
        """The post's paragraphs, one per line."""
        return "\n".join(self.paragraphs)


def write_post(rng: random.Random, index: int) -> Post:
    """Make up a story and write it as a post.

    Args:
        rng: the only source of randomness.
        index: number of the post.
    """
    subreddit = rng.choice(list(SUBREDDITS))
    facts = _invent_facts(rng, subreddit)
    title = rng.choice(TITLES).format(**facts)
    paragraphs = [_first_paragraph(rng, facts), _middle_paragraph(rng, facts), _last_paragraph(rng, facts)]
    if rng.random() < LONG_RATE:
        paragraphs += rng.sample(POSTSCRIPTS, rng.randint(2, 4))
    return Post(index, subreddit, title, tuple(filter(None, paragraphs)), MappingProxyType(facts))


def _invent_facts(rng: random.Random, subreddit: str) -> dict[str, str]:
    facts = {slot: rng.choice(LEXICON[slot]) for slot in CORE_SLOTS}
    facts["who"] = rng.choice(SUBREDDITS[subreddit])
    return facts | {slot: rng.choice(LEXICON[slot]) for slot in OPTIONAL_SLOTS if rng.random() >= ABSENT_RATE}


def _tell(rng: random.Random, facts: Mapping[str, str], slots: tuple[str, ...]) -> list[str]:
    return [rng.choice(TELLINGS[slot]).format(**facts) for slot in slots if slot in facts]


def _first_paragraph(rng: random.Random, facts: Mapping[str, str]) -> str:
    opening = [rng.choice(OPENINGS)] if rng.random() < OPENING_RATE else []
    return " ".join([*opening, rng.choice(TELLINGS["core"]).format(**facts)])


def _middle_paragraph(rng: random.Random, facts: Mapping[str, str]) -> str:
    sentences = [*_tell(rng, facts, MIDDLE_SLOTS), rng.choice(RAMBLINGS)]
    if rng.random() < BYSTANDER_RATE:
        sentences.append(_mention_bystander(rng, facts))
    return " ".join(rng.sample(sentences, len(sentences)))


def _last_paragraph(rng: random.Random, facts: Mapping[str, str]) -> str:
    sentences = _tell(rng, facts, LAST_SLOTS)
    sentences.insert(rng.randint(0, len(sentences)), rng.choice(RAMBLINGS))
    return " ".join(sentences)


def _mention_bystander(rng: random.Random, facts: Mapping[str, str]) -> str:
    slot = rng.choice(list(BYSTANDERS))
    other = rng.choice([value for value in LEXICON[slot] if value != facts.get(slot)])
    return rng.choice(BYSTANDERS[slot]).format(**{slot: other})
