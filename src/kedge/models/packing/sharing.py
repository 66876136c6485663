"""Packed passes in which rows with the same prompt share its tokens.

    rows      prompt A · response 1   prompt A · response 2   prompt B · response 3
    a pass    prompt B · response 3 | prompt A | response 1 | response 2

Embeddings, projections and norms run once on a prompt that several rows have, and each response attends to it and to
itself. A state of the prompt is that of every row, so their gradients add up in it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple


class Arranged(NamedTuple):
    """A pass in which prompts are shared.

    First come whole rows and shared prompts, longest first, and then the rests of the rows of each shared prompt.

    Attributes:
        read: The tokens to read, as places in the rows end to end.
        places: The place of every token of the rows among them.
        lengths: Tokens of the whole rows and of the shared prompts.
        rests: For each shared prompt, its tokens in the pass, and the lengths of what follows it.
    """

    read: list[int]
    places: list[int]
    lengths: tuple[int, ...]
    rests: list[tuple[slice, tuple[int, ...]]]


def arrange(row_lengths: Sequence[int], row_prompts: Sequence[tuple[int, int]]) -> Arranged | None:
    """Arrange rows so that each prompt of several rows is read once; None if no two rows have one in common.

    Args:
        row_lengths: Tokens of each row, longest first.
        row_prompts: See `TokenRows`.
    """
    shared = _shared(row_prompts)
    if not shared:
        return None
    starts = [0, *accumulate(row_lengths)]
    prompts = {row: row_prompts[row][1] for members in shared for row in members}
    first = {row: members[0] for members in shared for row in members}
    heads = [(prompts.get(row, length), row) for row, length in enumerate(row_lengths) if first.get(row, row) == row]
    heads.sort(key=lambda head: -head[0])
    lengths = tuple(length for length, _ in heads)
    begins = {row: end - length for end, (length, row) in zip(accumulate(lengths), heads, strict=True)}
    read = [starts[row] + place for length, row in heads for place in range(length)]
    places = [0] * starts[-1]
    for row, length in enumerate(row_lengths):
        head = first.get(row, row)
        length = prompts.get(row, length)
        places[starts[row] : starts[row] + length] = range(begins[head], begins[head] + length)
    rests: list[tuple[slice, tuple[int, ...]]] = []
    for members in shared:
        prompt = prompts[members[0]]
        longer = [row for row in members if row_lengths[row] > prompt]
        for row in longer:
            rest = range(starts[row] + prompt, starts[row] + row_lengths[row])
            places[rest.start : rest.stop] = range(len(read), len(read) + len(rest))
            read.extend(rest)
        if longer:
            begin = begins[members[0]]
            rests.append((slice(begin, begin + prompt), tuple(row_lengths[row] - prompt for row in longer)))
    return Arranged(read, places, lengths, rests)


def _shared(row_prompts: Sequence[tuple[int, int]]) -> list[list[int]]:
    """The rows of each prompt that several have."""
    found: dict[int, list[int]] = defaultdict(list)
    for row, (number, length) in enumerate(row_prompts):
        if length:
            found[number].append(row)
    return [each for each in found.values() if len(each) > 1]
