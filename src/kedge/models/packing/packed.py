"""A pass over rows without padding: how they are packed, and their attention.

Embeddings, projections and norms run on real tokens only. Inside the attention, where rows must not see each other,
they are arranged in rectangles. This is registered as an attention implementation of transformers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, groupby, pairwise
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from kedge.algorithm.prefixes import Pieces
from kedge.models.packing.rows import TokenRows

ATTENTION_NAME: Final = "kedge_layout"
UNSUPPORTED: Final = ("softcap", "s_aux", "position_bias")
"""Arguments of transformers' attention that change its result and that no layout supports."""
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


class UnsupportedAttention(Exception):
    """The model's attention uses an unsupported feature, or never receives the layout."""


@dataclass(frozen=True)
class _Group:
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
    prompt: Spans | Int[Tensor, "rows before"] | None = None
    mask: Bool[Tensor, "longest read"] | Float[Tensor, "rows 1 longest read"] | None = None


@dataclass(frozen=True)
class Packed:
    """Rows end to end in one batch entry, with causal attention within each row.

    Rows are sorted by length, longest first; adjacent rows of similar length share a rectangle. After them come the
    rests of rows whose prompt is a separate row, prompt by prompt: they also attend to it.

    Attributes:
        groups: The rectangles.
        device: The kind of device that they are arranged for.
    """

    groups: tuple[_Group, ...]
    device: str

    @classmethod
    def of(
        cls,
        rows: TokenRows,
        rests: Sequence[tuple[Spans, tuple[int, ...]]] = (),
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> Packed:
        """Lay out rows sorted by length.

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
        return cls(tuple(groups), device)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """Softmax attention; `[1, heads, tokens, dim]` to `[1, tokens, heads, dim]`, as transformers expects."""
        sizes = [group.num_tokens for group in self.groups]
        whole = [states[0].transpose(0, 1) for states in (query, key, value)]
        parts = zip(self.groups, *(states.split(sizes) for states in whole), strict=True)
        # Not states[span]: its gradient is as large as that of the whole pass, for every prompt.
        spans = [span for group in self.groups if isinstance(group.prompt, tuple) for span in group.prompt]
        cuts = sorted({0, len(whole[0]), *(cut for span in spans for cut in (span.start, span.stop))})
        widths = [end - start for start, end in pairwise(cuts)]
        before = [dict(zip(cuts, states.split(widths), strict=False)) for states in whole[1:]]
        attended = partial(_attend_group, before=before, scaling=scaling, device=self.device)
        return torch.cat([attended(*part) for part in parts])[None]


def group_by_length(lengths: tuple[int, ...]) -> Iterator[list[int]]:
    """Split descending lengths where a row would fill less than `MIN_FILL` of its rectangle's width."""
    group: list[int] = []
    for length in lengths:
        if group and length < MIN_FILL * group[0]:
            yield group
            group = []
        group.append(length)
    yield group


def _group(lengths: list[int], device: torch.device, prompt: Spans | None = None) -> _Group:
    longest = max(lengths)
    num_tokens = sum(lengths)
    full = len(list(groupby(lengths))) == 1
    mask = torch.arange(longest) < torch.tensor(lengths)[:, None]
    slots = None if full else mask.flatten().nonzero().squeeze(1).to(device)
    seen = None
    if prompt is not None:
        before = _width(prompt)
        seen = torch.ones(longest, before + longest, dtype=torch.bool, device=device).tril(before)
    return _Group(len(lengths), longest, num_tokens, slots, prompt, seen)


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


def _group_of_several(rows: list[tuple[Spans, int]], device: torch.device, dtype: torch.dtype) -> _Group:
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


def _attend_group(
    group: _Group,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    before: Sequence[dict[int, Tensor]],
    scaling: float | None,
    device: str,
) -> Tensor:
    """Attention over `[tokens, heads, dim]`; padding comes after every real token, so the causal mask suffices.

    Args:
        group: The rows.
        query: Their queries.
        key: Their keys.
        value: Their values.
        before: Keys and values of the whole pass, split at the ends of the prompts' pieces; by their first token.
        scaling: Factor of the products.
        device: The kind of device that they are arranged for.
    """

    def rectangle(states: Tensor) -> Tensor:
        if group.slots is not None:
            places = states.new_zeros(group.num_rows * group.longest, *states.shape[1:])
            states = places.index_copy(0, group.slots, states)
        return states.reshape(group.num_rows, group.longest, *states.shape[1:]).transpose(1, 2)

    own = [rectangle(key), rectangle(value)]
    if (prompt := group.prompt) is None:
        outputs = attend(rectangle(query), *own, device=device, scaling=scaling, is_causal=True)
    else:
        keys, values = (_after_prompt(each, prompt, states, device) for each, states in zip(before, own, strict=True))
        outputs = attend(rectangle(query), keys, values, scaling=scaling, mask=group.mask, device=device)
    outputs = outputs.transpose(1, 2).flatten(0, 1)
    return outputs if group.slots is None else Gather.apply(outputs, group.slots)


def _after_prompt(before: dict[int, Tensor], prompt: Spans | Tensor, states: Tensor, device: str) -> Tensor:
    """The prompts' states before those of each row that continues one.

    They are cast before they are repeated, so that the rows' gradients are summed in the attention's number format.
    """
    dtype = attention_dtype(states, device)
    if isinstance(prompt, tuple):
        pieces = [before[span.start] for span in prompt]
        read_there = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        repeated = read_there.to(dtype).transpose(0, 1).expand(len(states), -1, -1, -1)
    else:
        chosen = before[0].to(dtype).index_select(0, prompt.flatten())
        repeated = chosen.unflatten(0, prompt.shape).transpose(1, 2)
    return torch.cat([repeated, states], dim=2)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float | None,
    device: str,
    is_causal: bool = False,
    mask: Tensor | None = None,
) -> Tensor:
    """Scaled dot-product attention, with grouped queries if there are fewer key heads than query heads."""
    dtype = attention_dtype(query, device)
    query, key, value = (each.to(dtype) for each in (query, key, value))
    shared = query.shape[1] // key.shape[1]
    call = partial(nn.functional.scaled_dot_product_attention, attn_mask=mask, is_causal=is_causal, scale=scaling)
    with torch.autocast(query.device.type, enabled=False):
        if mask is None or shared == 1 or not on_accelerator(device):
            return call(query, key, value, enable_gqa=shared > 1)
        # CUDA has no fast kernel for a mask and fewer key heads.
        parts = query.unflatten(1, (-1, shared)).unbind(2)
        return torch.stack([call(part, key, value) for part in parts], dim=2).flatten(1, 2)


def attention_dtype(states: Tensor, device: str) -> torch.dtype:
    """Number format of the attention: autocast's, but never bf16 on a CPU, where that kernel is slower."""
    if device == "cpu":
        return torch.promote_types(states.dtype, torch.float32)
    real = states.device.type
    return torch.get_autocast_dtype(real) if torch.is_autocast_enabled(real) else states.dtype


class Gather(torch.autograd.Function):
    """Select distinct states: from a rectangle back to tokens, or tokens in a different order.

    The backward pass of `index_select` would accumulate, since it cannot know that no state is selected twice.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, slots: Tensor) -> Tensor:
        """From `[size, …]` to `[tokens, …]`."""
        ctx.save_for_backward(slots)
        ctx.size = states.shape[0]
        return states.index_select(0, slots)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Scatter the tokens' gradients."""
        (slots,) = ctx.saved_tensors
        return gradient.new_zeros(ctx.size, *gradient.shape[1:]).index_copy_(0, slots, gradient), None


class Layout(Protocol):
    """Finds the rows among the tokens of a pass, and lets each token attend to its own row."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """Softmax attention; `[1, heads, tokens, dim]` to `[1, tokens, heads, dim]`, as transformers expects."""
        ...


def _by_layout(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: Layout | None = None,
    scaling: float | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """The function that transformers' attention modules call."""
    unsupported = [name for name in UNSUPPORTED if settings.get(name) is not None]
    if layout is None or attention_mask is not None or unsupported:
        raise UnsupportedAttention(f"{type(module).__name__}: {unsupported or 'its attention receives no layout'}")
    return layout.attend(query, key, value, scaling), None


AttentionInterface.register(ATTENTION_NAME, _by_layout)


@contextmanager
def layout_attention(config: PreTrainedConfig) -> Iterator[None]:
    """Make the model with this configuration use the layout passed to its forward call, within the block."""
    usual = config._attn_implementation
    config._attn_implementation = ATTENTION_NAME
    try:
        yield
    finally:
        config._attn_implementation = usual


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
        rests: The tokens in the pass of the pieces that rests continue, and the lengths of these rests.
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
    """The pieces of each row that others share; those that the same rows share in a row are one."""
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


def packed_states(
    model: PreTrainedModel, rows: TokenRows, arranged_for: str | None = None
) -> Float[Tensor, "tokens dim"]:
    """Compute the states of rows sorted by length, longest first, in one packed pass of a trunk.

    Args:
        model: The trunk.
        rows: The rows.
        arranged_for: The kind of device that the pass is arranged for, to plan its memory; None for that of the rows.
    """
    device = arranged_for or rows.ids.device.type
    arranged = arrange(rows.lengths, rows.prompts) if rows.prompts else None
    if arranged is None:
        return _pass(model, rows.ids, rows.positions, Packed.of(rows, device=device))
    read, places, layout = shared_layout(model, rows, arranged, device)
    # Not [places]: threads would add the gradients of a shared token in any order, so runs would not be reproducible.
    return _pass(model, rows.ids[read], rows.positions[read], layout).index_select(0, places)


def shared_layout(
    model: PreTrainedModel, rows: TokenRows, arranged: Arranged, device: str
) -> tuple[Tensor, Tensor, Packed]:
    """Arrange rows with shared prompts: the tokens that a pass reads, each token's index among them, and the layout."""
    read, places = (torch.tensor(each, device=rows.ids.device) for each in (arranged.read, arranged.places))
    dtype = attention_dtype(next(model.parameters()), device)
    return read, places, Packed.of(TokenRows(rows.ids, arranged.lengths), arranged.rests, dtype, device)


def _pass(
    model: PreTrainedModel, ids: Int[Tensor, " tokens"], positions: Int[Tensor, " tokens"], layout: Packed
) -> Float[Tensor, "tokens dim"]:
    with layout_attention(model.config):
        outputs = model(input_ids=ids[None], position_ids=positions[None], use_cache=False, layout=layout)
    return outputs.last_hidden_state[0]


def recompute_attention(config: PreTrainedConfig) -> AbstractContextManager[None]:
    """A context that restores the current attention when activation checkpointing recomputes a layer later."""
    by_layout = config._attn_implementation == ATTENTION_NAME
    return layout_attention(config) if by_layout else nullcontext()
