"""Rows of tokens end to end, and how a pass without padding reads them: shared pieces once, in rectangles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import Final, NamedTuple, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kedge.algorithm.prefixes import Pieces

MIN_FILL: Final = 0.7
"""Smallest share of its rectangle's width that a row may fill; below that, padding costs more than a second call."""
MOST_SEEN: Final = 2**26
"""Maximum elements of the mask of a rectangle for rows of several prompts, on an accelerator."""
MASK_STEP: Final = 16
"""Multiple of elements to which a mask's rows are padded, since CUDA's attention otherwise copies it at every call."""
Spans: TypeAlias = tuple[slice, ...]
"""The tokens of a pass that make up a prompt, piece by piece."""


def on_accelerator(device: str) -> bool:
    """True where few large operations are faster than many small ones: starting one takes longer than it runs."""
    return device == "cuda"


@dataclass(frozen=True)
class TokenRows:
    """Concatenated rows of different lengths.

    Attributes:
        ids: The rows' token ids, concatenated.
        lengths: Tokens of each row, at least 1.
        prompts: The pieces of each row's prompt, which rows with the same numbers share. Empty if no rows share any.
    """

    ids: Int[Tensor, " tokens"]
    lengths: tuple[int, ...]
    prompts: tuple[Pieces, ...] = ()

    @classmethod
    def of(
        cls, rows: Sequence[Sequence[int]], device: torch.device | str = "cpu", prompts: Sequence[Pieces] = ()
    ) -> TokenRows:
        """Make rows from lists of token ids."""
        ids = torch.tensor([token for row in rows for token in row], dtype=torch.long, device=device)
        return cls(ids, tuple(len(row) for row in rows), tuple(prompts))

    @classmethod
    def unpad(
        cls,
        ids: Int[Tensor, "rows width"],
        mask: Bool[Tensor, "rows width"],
        prompts: Sequence[Pieces] = (),
    ) -> TokenRows:
        """Extract the counted tokens of a padded tensor, in order."""
        return cls(ids[mask], tuple(mask.sum(dim=1).tolist()), tuple(prompts))

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(self.lengths)

    @property
    def starts(self) -> list[int]:
        """Index of each row's first token."""
        return [end - length for end, length in zip(accumulate(self.lengths), self.lengths, strict=True)]

    @property
    def last(self) -> Int[Tensor, " rows"]:
        """Index of each row's last token."""
        return torch.tensor(list(accumulate(self.lengths)), device=self.ids.device) - 1

    @property
    def positions(self) -> Int[Tensor, " tokens"]:
        """Each token's position in its row, from 0."""
        lengths = torch.tensor(self.lengths)
        starts = torch.tensor(self.starts).repeat_interleave(lengths)
        return (torch.arange(len(starts)) - starts).to(self.ids.device)

    def pad(
        self, pad_id: int = 0, *, left: bool = False
    ) -> tuple[Int[Tensor, "rows longest"], Bool[Tensor, "rows longest"]]:
        """Pad the rows to a tensor with `pad_id` on the right or left; also return its mask."""
        columns = torch.arange(self.longest)
        mask = (columns < torch.tensor(self.lengths)[:, None]).to(self.ids.device)
        mask = mask.flip(1) if left else mask
        return torch.full_like(mask, pad_id, dtype=torch.long).masked_scatter(mask, self.ids), mask

    def split(self, counts: Iterable[int]) -> list[TokenRows]:
        """Split into parts with these numbers of rows, in order; empty parts are dropped."""
        parts = []
        first_row = 0
        first_token = 0
        for count in counts:
            lengths = self.lengths[first_row : first_row + count]
            if lengths:
                ids = self.ids[first_token : first_token + sum(lengths)]
                parts.append(TokenRows(ids, lengths, self.prompts[first_row : first_row + count]))
            first_row += count
            first_token += sum(lengths)
        return parts

    def apart(self, limit: int | None) -> list[TokenRows]:
        """Split rows sorted by length, longest first, into those longer than a limit, if there is one, and the rest."""
        num_beyond = sum(limit is not None and length > limit for length in self.lengths)
        return self.split([num_beyond, len(self.lengths) - num_beyond])

    def batches(self, *, equal: bool) -> list[TokenRows]:
        """Split rows sorted by length, longest first, into batches of equal or else of similar length, for padding."""
        groups = (list(each) for _, each in groupby(self.lengths)) if equal else group_by_length(self.lengths)
        return self.split(map(len, groups))

    def token_indices(self, rows: Sequence[int]) -> Int[Tensor, " chosen"]:
        """Indices of the tokens of these rows, row by row."""
        starts = self.starts
        indices = [index for row in rows for index in range(starts[row], starts[row] + self.lengths[row])]
        return torch.tensor(indices, dtype=torch.long, device=self.ids.device)

    def take(self, rows: Sequence[int]) -> TokenRows:
        """Select rows, in this order."""
        prompts = tuple(self.prompts[row] for row in rows) if self.prompts else ()
        return TokenRows(self.ids[self.token_indices(rows)], tuple(self.lengths[row] for row in rows), prompts)

    def order(self) -> list[int]:
        """The rows' indices, longest first."""
        return sorted(range(len(self.lengths)), key=lambda row: -self.lengths[row])


class Pass(NamedTuple):
    """The tokens of a pass over some rows, and how they are laid out.

    Attributes:
        ids: The tokens, without the repetitions of shared ones.
        positions: Each token's position in its row.
        groups: The rectangles of the attention.
        places: For every token of the rows, its index among the tokens read; None if all are read in order.
    """

    ids: Int[Tensor, " tokens"]
    positions: Int[Tensor, " tokens"]
    groups: tuple[Group, ...]
    places: Int[Tensor, " all"] | None


def lay_out(rows: TokenRows, dtype: torch.dtype, device: str) -> Pass:
    """Lay out rows sorted by length, longest first, for a pass that reads each shared piece once.

    Args:
        rows: The rows.
        dtype: Number format of the attention.
        device: The kind of device to arrange them for.
    """
    arranged = arrange(rows.lengths, rows.prompts)
    if arranged is None:
        return Pass(rows.ids, rows.positions, rectangles(rows, device=device), None)
    read, places = (torch.tensor(each, device=rows.ids.device) for each in (arranged.read, arranged.places))
    groups = rectangles(TokenRows(rows.ids, arranged.lengths), arranged.rests, dtype, device)
    return Pass(rows.ids[read], rows.positions[read], groups, places)


class Arranged(NamedTuple):
    """A packed pass in which rows share the pieces of their prompts.

        rows      start · prompt A · response 1   start · prompt A · response 2   start · prompt B · response 3
        a pass    start | prompt B · response 3 | prompt A | response 1 | response 2

    Embeddings, projections and norms run once on a shared piece; the rows that continue it attend to it and to
    themselves, and their gradients add up there. Pieces are ordered by depth, whole rows and first pieces before those
    that continue one piece, those before the ones that continue two; within a depth, the longest comes first.

    Attributes:
        read: The tokens to read, as indices into the concatenated rows.
        places: For every token of the rows, its index among the tokens read.
        lengths: Tokens of the whole rows and of the pieces that begin rows.
        rests: The spans in the pass of the pieces that rests of rows continue, and the rests' lengths.
    """

    read: list[int]
    places: list[int]
    lengths: tuple[int, ...]
    rests: list[tuple[Spans, tuple[int, ...]]]


def arrange(row_lengths: Sequence[int], prompts: Sequence[Pieces]) -> Arranged | None:
    """Arrange rows so that each shared piece is read once; None if no rows share any.

    Args:
        row_lengths: Tokens of each row, longest first.
        prompts: The pieces of each row's prompt; see `TokenRows`.
    """
    chains = _shared_pieces(prompts)
    if not any(chains):
        return None
    starts = list(accumulate(row_lengths, initial=0))
    # What follows the same pieces: shared pieces with their numbers, and the rests of rows. Whole rows and first pieces
    # follow none.
    parts: dict[tuple[int, ...], list[tuple[int | None, range]]] = {(): []}
    known = set[int]()
    for chain, place, end in zip(chains, starts, starts[1:], strict=False):
        before: tuple[int, ...] = ()
        for number, tokens in chain:
            if number not in known:
                parts.setdefault(before, []).append((number, range(place, place + tokens)))
            known.add(number)
            before, place = (*before, number), place + tokens
        if place < end:
            parts.setdefault(before, []).append((None, range(place, end)))
    read: list[int] = []
    places = [0] * starts[-1]
    spans = dict[int, slice]()
    lengths: dict[tuple[int, ...], tuple[int, ...]] = {}
    for before in sorted(parts, key=len):
        parts[before].sort(key=lambda part: -len(part[1]))
        lengths[before] = tuple(len(tokens) for _, tokens in parts[before])
        for number, tokens in parts[before]:
            here = range(len(read), len(read) + len(tokens))
            read.extend(tokens)
            if number is None:
                places[tokens.start : tokens.stop] = here
            else:
                spans[number] = slice(here.start, here.stop)
    for chain, place in zip(chains, starts, strict=False):
        for number, tokens in chain:
            places[place : place + tokens] = range(spans[number].start, spans[number].stop)
            place += tokens
    rests = [(tuple(spans[number] for number in before), lengths[before]) for before in lengths if before]
    return Arranged(read, places, lengths[()], rests)


def _shared_pieces(prompts: Sequence[Pieces]) -> list[Pieces]:
    """The pieces of each row that others share; successive pieces that the same rows share are joined.

    Pieces form a tree: if as many rows share a piece as share the one before it, they are the same rows.
    """
    counts = Counter(number for pieces in prompts for number, tokens in pieces if tokens)
    found: list[Pieces] = []
    for pieces in prompts:
        shared: list[tuple[int, int]] = []
        for number, tokens in pieces:
            if counts[number] < 2:
                continue
            if shared and counts[shared[-1][0]] == counts[number]:
                shared[-1] = (shared[-1][0], shared[-1][1] + tokens)
            else:
                shared.append((number, tokens))
        found.append(tuple(shared))
    return found


@dataclass(frozen=True)
class Group:
    """Adjacent rows of similar length in a rectangle.

    Attributes:
        num_rows: Number of rows.
        longest: Number of columns.
        num_tokens: Number of tokens.
        slots: Each token's position in the rectangle; None if the rectangle is full.
        prompt: The prompt before the rows: its spans if all rows share one; otherwise, for each row, the indices of its
            prompt's tokens in the pass. None if the rows contain their own prompts.
        mask: For a shared prompt, the prompt tokens and columns that each column attends to; otherwise the additive
            attention mask of each row.
    """

    num_rows: int
    longest: int
    num_tokens: int
    slots: Int[Tensor, " tokens"] | None
    prompt: Spans | Int[Tensor, "rows before"] | None
    mask: Bool[Tensor, "longest read"] | Float[Tensor, "rows 1 longest read"] | None


def rectangles(
    rows: TokenRows,
    rests: Sequence[tuple[Spans, tuple[int, ...]]] = (),
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> tuple[Group, ...]:
    """Arrange rows sorted by length, longest first, in rectangles: adjacent rows of similar length share one.

    After them come the rests of rows whose prompt is a separate row, prompt by prompt.

    Args:
        rows: The rows.
        rests: The pieces that rests continue, and the rests' lengths; see `Arranged`.
        dtype: Number format of the attention.
        device: The kind of device to arrange them for.
    """
    assert list(rows.lengths) == sorted(rows.lengths, reverse=True), "rows must be sorted by length, longest first"
    place = rows.ids.device
    groups = [_group(lengths, place) for lengths in group_by_length(rows.lengths)]
    parts = [(part, prompt) for prompt, lengths in rests for part in group_by_length(lengths)]
    if on_accelerator(device) and len(several := list(_by_size(rests))) < len(parts):
        groups += [_group_of_several(each, place, dtype) for each in several]
    else:
        groups += [_group(part, place, prompt) for part, prompt in parts]
    return tuple(groups)


def group_by_length(lengths: tuple[int, ...]) -> Iterator[list[int]]:
    """Split descending lengths where a row would fill less than `MIN_FILL` of its rectangle's width."""
    group: list[int] = []
    for length in lengths:
        if group and length < MIN_FILL * group[0]:
            yield group
            group = []
        group.append(length)
    yield group


def _group(lengths: list[int], device: torch.device, prompt: Spans | None = None) -> Group:
    longest = max(lengths)
    num_tokens = sum(lengths)
    full = min(lengths) == longest
    mask = torch.arange(longest) < torch.tensor(lengths)[:, None]
    slots = None if full else mask.flatten().nonzero().squeeze(1).to(device)
    seen = None
    if prompt is not None:
        before = _width(prompt)
        seen = torch.ones(longest, before + longest, dtype=torch.bool, device=device).tril(before)
    return Group(len(lengths), longest, num_tokens, slots, prompt, seen)


def _width(prompt: Spans) -> int:
    return sum(span.stop - span.start for span in prompt)


def _by_size(rests: Iterable[tuple[Spans, tuple[int, ...]]]) -> Iterator[list[tuple[Spans, int]]]:
    """Batch the rests of successive prompts, each with its prompt and length, into rectangles of limited mask size."""
    rows: list[tuple[Spans, int]] = []
    longest = before = 0
    for prompt, length in ((prompt, length) for prompt, lengths in rests for length in lengths):
        longest, before = max(longest, length), max(before, _width(prompt))
        if rows and (len(rows) + 1) * longest * (before + longest) > MOST_SEEN:
            yield rows
            rows, longest, before = [], length, _width(prompt)
        rows.append((prompt, length))
    if rows:
        yield rows


def _group_of_several(rows: list[tuple[Spans, int]], device: torch.device, dtype: torch.dtype) -> Group:
    """Make a rectangle of rows that continue different prompts."""
    group = _group([length for _, length in rows], device)
    before = max(_width(prompt) for prompt, _ in rows)
    widths = torch.tensor([_width(prompt) for prompt, _ in rows])
    is_there = torch.arange(before) < widths[:, None]
    # Gaps point to a token that is masked.
    places = torch.tensor([prompt[0].start for prompt, _ in rows])[:, None].expand(-1, before)
    read_there = torch.cat([torch.arange(span.start, span.stop) for prompt, _ in rows for span in prompt])
    chosen = places.masked_scatter(is_there, read_there).to(device)
    read = before + group.longest
    width = -(-read // MASK_STEP) * MASK_STEP
    mask = torch.zeros(len(rows), 1, group.longest, width, dtype=dtype, device=device)
    causal = torch.full((group.longest, group.longest), -torch.inf, dtype=dtype, device=device).triu(1)
    mask[:, 0, :, before:read] = causal
    mask[:, 0, :, :before].masked_fill_(~is_there.to(device)[:, None], -torch.inf)
    return replace(group, prompt=chosen, mask=mask[..., :read])
