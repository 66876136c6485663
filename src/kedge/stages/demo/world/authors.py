"""Authors of the reference summaries, with differing skill."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kedge.stages.demo.world.posts import Post
from kedge.stages.demo.world.words import (
    ADJUNCTS,
    CLOSINGS,
    HEADLINE,
    LEXICON,
    OPTIONAL_SLOTS,
    RAMBLINGS,
)

__all__ = ["AUTHORS", "Author", "write_summary"]


@dataclass(frozen=True)
class Author:
    """How an author summarizes; the rates are probabilities.

    Attributes:
        include_rate: an optional fact of the post is stated.
        invent_rate: the summary has one unsupported fact, wrong or made up.
        ramble_rate: an irrelevant sentence is added.
    """

    name: str
    include_rate: float
    invent_rate: float
    ramble_rate: float


AUTHORS: Final = (
    Author("careful", include_rate=0.85, invent_rate=0.03, ramble_rate=0.05),
    Author("hasty", include_rate=0.4, invent_rate=0.1, ramble_rate=0.05),
    Author("rambling", include_rate=0.55, invent_rate=0.1, ramble_rate=0.8),
    Author("careless", include_rate=0.55, invent_rate=0.4, ramble_rate=0.15),
)


def write_summary(rng: random.Random, post: Post, author: Author) -> str:
    """Summarize a post in the author's style: the facts noticed, correct or not."""
    stated = {slot: value for slot, value in post.facts.items() if _notices(rng, author, slot)}
    if rng.random() < author.invent_rate:
        slot = rng.choice(list(LEXICON))
        stated[slot] = rng.choice([value for value in LEXICON[slot] if value != post.facts.get(slot)])
    ramblings = [rng.choice(RAMBLINGS)] if rng.random() < author.ramble_rate else []
    return " ".join([_headline(stated), *ramblings, *_closing(stated)])


def _notices(rng: random.Random, author: Author, slot: str) -> bool:
    return slot not in OPTIONAL_SLOTS or rng.random() < author.include_rate


def _headline(stated: Mapping[str, str]) -> str:
    adjuncts = [text for slot, text in ADJUNCTS.items() if slot in stated]
    return "".join([HEADLINE, *adjuncts, "."]).format(**stated)


def _closing(stated: Mapping[str, str]) -> list[str]:
    return [sentence.format(**stated) for slot, sentence in CLOSINGS.items() if slot in stated]
