"""The gold judge: scores a summary with full knowledge of the post's facts.

The axes are Stiennon's. Training has no access to the judge; only the annotator's labels derive from it.
"""

import re
from dataclasses import dataclass
from typing import Final

from kedge.stages.demo.world.posts import Post
from kedge.stages.demo.world.words import ADJUNCTS, CLOSINGS, HEADLINE, LEXICON, RAMBLINGS

__all__ = ["AXES", "SummaryScores", "judge_summary", "stated_facts"]

AXES: Final[dict[str, float]] = {"coverage": 0.55, "accuracy": 0.25, "coherence": 0.1, "brevity": 0.1}
"""Weight of each axis in the quality. Coverage has the largest, as for Stiennon's labelers."""
IDEAL_WORDS: Final = 28
"""Enough words to state every fact of a story."""
TOO_MANY_WORDS: Final = 48


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
    supported = {(slot, value) for slot, value in stated if post.facts.get(slot) == value}
    return SummaryScores(
        coverage=len(supported) / len(post.facts),
        accuracy=len(supported) / len(stated) if stated else 0.0,
        coherence=_coherence(summary),
        brevity=_brevity(summary),
    )


def stated_facts(text: str) -> set[tuple[str, str]]:
    """All `(slot, value)` pairs that a text mentions, in any position and case."""
    return {
        (slot, value)
        for slot, pattern in _MENTIONS.items()
        for value in (_SPELLINGS[found.lower()] for found in pattern.findall(text))
    }


def _coherence(summary: str) -> float:
    sentences = [sentence for sentence in re.split(r"(?<=[.?!])\s+", summary.strip()) if sentence]
    well_formed = {sentence for sentence in sentences if _SENTENCE.fullmatch(sentence)}
    return len(well_formed) / len(sentences) if sentences else 0.0


def _brevity(summary: str) -> float:
    words = len(summary.split())
    return min(1.0, max(0.0, (TOO_MANY_WORDS - words) / (TOO_MANY_WORDS - IDEAL_WORDS))) if words else 0.0


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


_SPELLINGS: Final = {value.lower(): value for words in LEXICON.values() for value in words}
_MENTIONS: Final = {
    slot: re.compile(rf"\b{_any_of(tuple(map(re.escape, words)))}\b", re.IGNORECASE) for slot, words in LEXICON.items()
}
_SENTENCE: Final = _sentence_pattern()
