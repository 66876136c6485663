"""The embedded world: TL;DR summarization in miniature, with a gold judge that has the facts of every post.

Posts with distractions, authors of differing skill, their texts and preferences, as functions of seed and index.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import exp
from types import MappingProxyType

from kedge.data.records import Comparison, Demonstration, Prompt
from kedge_lab.demo.words import (
    ADJUNCTS,
    BYSTANDERS,
    CLOSINGS,
    CORE_SLOTS,
    HEADLINE,
    LEXICON,
    OPENINGS,
    OPTIONAL_SLOTS,
    POSTSCRIPTS,
    RAMBLINGS,
    SUBREDDITS,
    TELLINGS,
    TITLES,
)

ANNOTATOR_TEMPERATURE = 0.06
"""Noise of the annotator in units of gold quality: 73 % of such differences are labeled correctly, lapses aside."""
ANNOTATOR_LAPSE_RATE = 0.05
"""Share of labels that the annotator gives at random."""


def render_whole(post: Post) -> str:
    """The TL;DR prompt of a post, not truncated."""
    return f"SUBREDDIT: r/{post.subreddit}\n\nTITLE: {post.title}\n\nPOST: {post.text}\n\nTL;DR:"


@dataclass(frozen=True)
class World:
    """An endless forum with authors and an annotator.

    Item `i` of a seed and split is always the same and depends on no other item.

    Attributes:
        seed: seed of the whole world.
        split: name of the split; posts of two splits are independent.
        render: turns a post into the prompt's text, for instance truncated for a tokenizer.
    """

    seed: int = 0
    split: str = "train"
    render: Callable[[Post], str] = render_whole

    def post(self, index: int) -> Post:
        """The post with this number."""
        return write_post(self._rng("post", index), index)

    def posts(self, count: int, *, start: int = 0) -> list[Post]:
        """The posts `start … start + count − 1`."""
        return [self.post(index) for index in range(start, start + count)]

    def reference(self, post: Post, *, version: int = 0) -> str:
        """A summary by a random author; each version is by a different one."""
        rng = self._rng(f"reference-{version}", post.index)
        author = rng.sample(AUTHORS, len(AUTHORS))[version % len(AUTHORS)]
        return write_summary(rng, post, author)

    def demonstrations(self, count: int, *, start: int = 0) -> list[Demonstration]:
        """Posts with their reference summaries."""
        return [Demonstration(self.render(post), " " + self.reference(post)) for post in self.posts(count, start=start)]

    def prompts(self, count: int, *, start: int = 0) -> list[Prompt]:
        """Posts as prompts."""
        return [self.prompt(post) for post in self.posts(count, start=start)]

    def prompt(self, post: Post) -> Prompt:
        """The prompt of a post; the column `index` identifies the post."""
        return Prompt(self.render(post), {"index": post.index})

    def comparisons(self, count: int, *, start: int = 0) -> list[Comparison]:
        """Two reference summaries of each post, ordered by the annotator."""
        return [
            self.compare(post, *(" " + self.reference(post, version=version) for version in (0, 1)))
            for post in self.posts(count, start=start)
        ]

    def compare(self, post: Post, first: str, second: str) -> Comparison:
        """The annotator's preference: a noisy version of the gold judge's, which is all that training sees of it.

        P(first ≻ second) = (1 − lapse) · σ((quality(first) − quality(second)) / temperature) + lapse / 2

        Source: Bradley and Terry 1952, with a lapse rate.
        """
        rng = self._rng(f"compare:{first}:{second}", post.index)
        difference = judge_summary(post, first).quality - judge_summary(post, second).quality
        prefers_first = 1.0 / (1.0 + exp(-difference / ANNOTATOR_TEMPERATURE))
        if rng.random() < ANNOTATOR_LAPSE_RATE:
            prefers_first = 0.5
        chosen, rejected = (first, second) if rng.random() < prefers_first else (second, first)
        return Comparison(self.render(post), chosen, rejected)

    def _rng(self, purpose: str, index: int) -> random.Random:
        return random.Random(f"{self.seed}/{self.split}/{purpose}/{index}")


@dataclass(frozen=True)
class Author:
    """An author's habits of summarizing; the rates are probabilities.

    Attributes:
        include_rate: an optional fact of the post is stated.
        invent_rate: the summary has one unsupported fact, wrong or made up.
        ramble_rate: an irrelevant sentence is added.
    """

    name: str
    include_rate: float
    invent_rate: float
    ramble_rate: float


AUTHORS = (
    Author("careful", include_rate=0.85, invent_rate=0.03, ramble_rate=0.05),
    Author("hasty", include_rate=0.4, invent_rate=0.1, ramble_rate=0.05),
    Author("rambling", include_rate=0.55, invent_rate=0.1, ramble_rate=0.8),
    Author("careless", include_rate=0.55, invent_rate=0.4, ramble_rate=0.15),
)


def write_summary(rng: random.Random, post: Post, author: Author) -> str:
    """Summarize a post in the author's style: the facts noticed, correct or not."""
    stated = {
        slot: value
        for slot, value in post.facts.items()
        if slot not in OPTIONAL_SLOTS or rng.random() < author.include_rate
    }
    if rng.random() < author.invent_rate:
        slot = rng.choice(list(LEXICON))
        stated[slot] = _other_value(rng, slot, post.facts)
    ramblings = [rng.choice(RAMBLINGS)] if rng.random() < author.ramble_rate else []
    adjuncts = [text for slot, text in ADJUNCTS.items() if slot in stated]
    closings = [sentence for slot, sentence in CLOSINGS.items() if slot in stated]
    return " ".join(["".join([HEADLINE, *adjuncts, "."]), *ramblings, *closings]).format(**stated)


def _other_value(rng: random.Random, slot: str, facts: Mapping[str, str]) -> str:
    """A value of a slot that is not the story's."""
    return rng.choice([value for value in LEXICON[slot] if value != facts.get(slot)])


ABSENT_RATE = 0.12
"""Probability that an optional fact is missing from a story."""
OPENING_RATE = 0.4
BYSTANDER_RATE = 0.25
LONG_RATE = 0.12


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
    facts = {slot: rng.choice(LEXICON[slot]) for slot in CORE_SLOTS}
    facts["who"] = rng.choice(SUBREDDITS[subreddit])
    facts |= {slot: rng.choice(LEXICON[slot]) for slot in OPTIONAL_SLOTS if rng.random() >= ABSENT_RATE}
    title = rng.choice(TITLES).format(**facts)

    def told(*slots: str) -> list[str]:
        return [rng.choice(TELLINGS[slot]).format(**facts) for slot in slots if slot in facts]

    opening = [rng.choice(OPENINGS)] if rng.random() < OPENING_RATE else []
    first = [*opening, rng.choice(TELLINGS["core"]).format(**facts)]
    middle = [*told("place", "time", "reason"), rng.choice(RAMBLINGS)]
    if rng.random() < BYSTANDER_RATE:
        slot = rng.choice(list(BYSTANDERS))
        other = _other_value(rng, slot, facts)
        middle.append(rng.choice(BYSTANDERS[slot]).format(**{slot: other}))
    middle = rng.sample(middle, len(middle))
    last = told("demand", "feeling", "question")
    last.insert(rng.randint(0, len(last)), rng.choice(RAMBLINGS))
    postscripts = rng.sample(POSTSCRIPTS, rng.randint(2, 4)) if rng.random() < LONG_RATE else []
    return Post(index, subreddit, title, (*map(" ".join, (first, middle, last)), *postscripts), MappingProxyType(facts))


AXES = {"coverage": 0.55, "accuracy": 0.25, "coherence": 0.1, "brevity": 0.1}
"""Weight of each axis in the quality. Coverage has the largest, as for Stiennon's labelers."""
IDEAL_WORDS = 28
"""Enough words to state every fact of a story."""
TOO_MANY_WORDS = 48


@dataclass(frozen=True)
class SummaryScores:
    """Scores of a summary, each in [0, 1]."""

    coverage: float
    accuracy: float
    coherence: float
    brevity: float

    @property
    def quality(self) -> float:
        """Sum of the scores, weighted by `AXES`; in [0, 1]."""
        return sum(weight * getattr(self, axis) for axis, weight in AXES.items())


def judge_summary(post: Post, summary: str) -> SummaryScores:
    """Score any text as a summary of the post.

    coverage  = stated key facts / key facts
    accuracy  = stated key facts / stated facts; 0 if no fact is stated
    coherence = distinct well-formed sentences / sentences; 0 without a sentence
    brevity   = 1 up to 28 words, falling linearly to 0 at 48; 0 for an empty text

    Source: the axes of Stiennon et al. 2020 (arXiv 2009.01325), appendix C.5, made computable.
    """
    stated = stated_facts(summary)
    supported = stated & post.facts.items()
    sentences = [sentence for sentence in re.split(r"(?<=[.?!])\s+", summary.strip()) if sentence]
    well_formed = {sentence for sentence in sentences if _SENTENCE.fullmatch(sentence)}
    words = len(summary.split())
    return SummaryScores(
        coverage=len(supported) / len(post.facts),
        accuracy=len(supported) / len(stated) if stated else 0.0,
        coherence=len(well_formed) / len(sentences) if sentences else 0.0,
        brevity=min(1.0, max(0.0, (TOO_MANY_WORDS - words) / (TOO_MANY_WORDS - IDEAL_WORDS))) if words else 0.0,
    )


def stated_facts(text: str) -> set[tuple[str, str]]:
    """All `(slot, value)` pairs that a text mentions, in any position and case."""
    return {(slot, _SPELLINGS[found.lower()]) for slot, pattern in _MENTIONS.items() for found in pattern.findall(text)}


def _any_of(patterns: tuple[str, ...]) -> str:
    return "(?:" + "|".join(patterns) + ")"


def _sentence_pattern() -> re.Pattern[str]:
    """Pattern of every well-formed sentence, with any value in any slot.

    A headline has its adjuncts in any order, each at most once.
    """
    values = {slot: _any_of(tuple(map(re.escape, words))) for slot, words in LEXICON.items()}
    adjuncts = _any_of(tuple(text.format(**values) for text in ADJUNCTS.values()))
    adjunct_starts = _any_of(tuple(text.split("{")[0] for text in ADJUNCTS.values()))
    none_twice = f"(?!.*({adjunct_starts}).*\\1)"
    headline = none_twice + HEADLINE.format(**values) + adjuncts + r"*\."
    others = tuple(re.escape(text) for text in RAMBLINGS) + tuple(
        text.replace("?", r"\?").replace(".", r"\.").format(**values) for text in CLOSINGS.values()
    )
    return re.compile(_any_of((headline, *others)))


_SPELLINGS = {value.lower(): value for words in LEXICON.values() for value in words}
_MENTIONS = {
    slot: re.compile(rf"\b{_any_of(tuple(map(re.escape, words)))}\b", re.IGNORECASE) for slot, words in LEXICON.items()
}
_SENTENCE = _sentence_pattern()
