"""Common prefixes of a batch's rows, which a forward pass reads only once."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import TypeAlias

Pieces: TypeAlias = tuple[tuple[int, int], ...]
"""The pieces that a row begins with, in order, each a number and its tokens. Rows share the pieces whose numbers they
have in common, which are their first ones."""

LEAST_SHARED = 1 / 11
"""Smallest piece that different prompts share, relative to the longest row: attending to a shorter one costs more than
reading it once saves."""


def prefix_tree(texts: Sequence[tuple[int, ...]], *, longest: int) -> list[Pieces]:
    """Split texts into pieces at the ends of their common prefixes.

    Equal texts have the same pieces. Different ones share a piece only if it has at least `LEAST_SHARED` times the
    tokens of the longest row.

    Args:
        texts: Token ids.
        longest: Tokens of the longest row, in which each text is followed by others.

    Returns:
        The pieces of each text. The last one, which no different text shares, is numbered by the index of the first
        such text; shared pieces have negative numbers.
    """
    first = {text: index for index, text in reversed(list(enumerate(texts)))}
    pieces = dict[tuple[int, ...], Pieces]()
    num_common = 0
    # Each entry: texts in lexicographic order, the pieces already found for them, and the number of tokens in those
    # pieces.
    open_ends: list[tuple[list[tuple[int, ...]], Pieces, int]] = [(sorted(first), (), 0)] if first else []
    while open_ends:
        group, before, read = open_ends.pop()
        if len(group) == 1:
            pieces[group[0]] = (*before, (first[group[0]], len(group[0]) - read))
            continue
        common = common_start([group[0], group[-1]])  # all others lie between these two
        if common - read >= max(1.0, LEAST_SHARED * longest):
            num_common += 1
            before, read = (*before, (-num_common, common - read)), common
        children = groupby(group, key=lambda text, common=common: text[common : common + 1])
        open_ends += [(list(child), before, read) for _, child in children]
    return [pieces[text] for text in texts]


@dataclass(frozen=True)
class Contexts:
    """The contexts of some tokens of episodes.

    Attributes:
        paths: Token ids of contexts that are not part of a longer one.
        rows: The episode of each path.
        states: For each token that was asked for, the path of its context, and the place of its last token there.
    """

    paths: list[list[int]]
    rows: list[int]
    states: list[tuple[int, int]]

    @cached_property
    def pieces(self) -> list[Pieces]:
        """The pieces that the paths share at their start."""
        return prefix_tree([*map(tuple, self.paths)], longest=max(map(len, self.paths), default=0))

    def add(
        self,
        row: int,
        prompt: Sequence[int],
        ids: Sequence[int],
        parents: Sequence[int],
        ends: Sequence[int],
        added: Sequence[int] = (),
    ) -> None:
        """Add contexts of an episode.

        Args:
            row: Its number.
            prompt: Its opening.
            ids: The tokens after it.
            parents: The slot of the token that each of them follows; see `Rollout.parents`.
            ends: The slots in which the contexts end.
            added: Tokens to insert after a context's part of the opening.
        """
        places: dict[int, tuple[int, int]] = {}
        for end in sorted(set(ends), reverse=True):  # the longer ones first
            if end in places:
                continue
            path: list[int] = []
            slot = end
            while slot >= 0:
                path.append(slot)
                slot = parents[slot]
            path.reverse()
            begin = [*prompt[: len(prompt) + slot + 1], *added]
            for place, each in enumerate([slot, *path], start=len(begin) - 1):
                places.setdefault(each, (len(self.paths), place))
            self.paths.append([*begin, *(ids[each] for each in path)])
            self.rows.append(row)
        self.states.extend(places[end] for end in ends)


def repeated_tokens(pieces: Iterable[Pieces]) -> int:
    """Number of tokens saved by reading shared pieces once."""
    every = [piece for each in pieces for piece in each]
    return sum(tokens for _, tokens in every) - sum(dict(every).values())


def common_start(texts: Sequence[Sequence[Hashable]]) -> int:
    """Length of the prefix common to all texts, in tokens."""
    columns = zip(*texts, strict=False)
    return next(
        (place for place, column in enumerate(columns) if len(set(column)) > 1), min(map(len, texts), default=0)
    )
