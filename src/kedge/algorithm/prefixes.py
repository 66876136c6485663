"""What the rows of a batch begin with in common; a pass through a model reads it once."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import groupby
from typing import TypeAlias

Pieces: TypeAlias = tuple[tuple[int, int], ...]
"""The pieces that a row begins with, in order, each a number and its tokens. Rows share the pieces whose numbers they
have in common, which are their first ones."""

LEAST_SHARED = 1 / 11
"""Smallest piece that different prompts share, relative to the longest row: attending to a shorter one costs more than
reading it once saves."""


def prefix_tree(texts: Sequence[tuple[int, ...]], *, longest: int) -> list[Pieces]:
    """Divide texts into the pieces that they begin with in common.

    Equal texts have the same pieces. Different ones share a common beginning of at least `LEAST_SHARED` of the longest
    row, at every place where they part.

    Args:
        texts: Token ids.
        longest: Tokens of the longest row, in which each text is followed by others.

    Returns:
        The pieces of each text. The last one, with what no other text shares, has the index of the first such text as
        its number; numbers of common beginnings are negative.
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


def repeated_tokens(pieces: Iterable[Pieces]) -> int:
    """The tokens that are not read again where rows share their pieces."""
    every = [piece for each in pieces for piece in each]
    return sum(tokens for _, tokens in every) - sum(dict(every).values())


def common_start(texts: Sequence[Sequence[Hashable]]) -> int:
    """The number of tokens that all texts begin with."""
    columns = zip(*texts, strict=False)
    return next(
        (place for place, column in enumerate(columns) if len(set(column)) > 1), min(map(len, texts), default=0)
    )
