"""The world as a data set: posts, demonstrations, comparisons and prompts as functions of seed and index."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from math import exp
from typing import Final

from kedge.data.records import Comparison, Demonstration, Prompt
from kedge.stages.demo.world.authors import AUTHORS, write_summary
from kedge.stages.demo.world.judge import judge_summary
from kedge.stages.demo.world.posts import Post, write_post

__all__ = ["World", "render_whole"]

ANNOTATOR_TEMPERATURE: Final = 0.06
"""In units of gold quality: a difference of this size is labeled correctly 73 % of the time, lapses aside."""
ANNOTATOR_LAPSE_RATE: Final = 0.05
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
            self.compare(post, " " + self.reference(post), " " + self.reference(post, version=1))
            for post in self.posts(count, start=start)
        ]

    def compare(self, post: Post, first: str, second: str) -> Comparison:
        """The annotator's preference: a noisy version of the gold judge's, and all that training sees of it.

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
