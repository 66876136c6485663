"""Passes and decoding without padding, and their attention.

Embeddings, projections and norms run on real tokens only. Inside the attention, where rows must not see each other,
they are arranged in rectangles. This is registered as an attention implementation of transformers.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from kedge.algorithm.prefixes import prefix_tree
from kedge.models.packing.rows import MASK_STEP, Group, Spans, TokenRows, lay_out, on_accelerator
from kedge_base.errors import ModelError

ATTENTION_NAME: Final = "kedge_layout"
UNSUPPORTED: Final = ("softcap", "s_aux", "position_bias")
"""Arguments of transformers' attention that change its result and that no layout supports."""
MIN_GROWTH: Final = 32
"""Minimum number of columns by which a key–value cache grows, because growing copies it."""
CACHE_NAMES: Final = ("cache", "cache_params", "past_key_values")
"""Names of a trunk's argument for its cache; the first is used from transformers 5.24 on."""


class UnsupportedAttention(Exception):
    """The model's attention uses an unsupported feature, or never receives the layout."""


@dataclass(frozen=True)
class Packed:
    """Rows end to end in one batch entry, with causal attention within each row.

    Attributes:
        groups: The rectangles; see `rectangles`.
        device: The kind of device that they are arranged for.
    """

    groups: tuple[Group, ...]
    device: str

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """Softmax attention; `[1, heads, tokens, dim]` to `[1, tokens, heads, dim]`, as transformers expects."""
        sizes = [group.num_tokens for group in self.groups]
        whole = [states[0].transpose(0, 1) for states in (query, key, value)]
        parts = zip(self.groups, *(states.split(sizes) for states in whole), strict=True)
        # Not states[span]: its gradient is as large as that of the whole pass, for every prompt.
        spans = [span for group in self.groups if isinstance(group.prompt, tuple) for span in group.prompt]
        cuts = sorted({0, len(whole[0]), *(cut for span in spans for cut in (span.start, span.stop))})
        widths = [end - start for start, end in pairwise(cuts)]
        # Pieces of prompts do not overlap, so a part's first token identifies it; without pieces, part 0 is the whole.
        before = [dict(zip(cuts, states.split(widths), strict=False)) for states in whole[1:]]
        attended = partial(_attend_group, before=before, scaling=scaling, device=self.device)
        return torch.cat([attended(*part) for part in parts])[None]


def _attend_group(
    group: Group,
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
        # CUDA has no fast kernel for grouped queries with a mask.
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


def _by_layout(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: Packed | KeyValues | None = None,
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
    ids, positions, groups, places = lay_out(rows, attention_dtype(next(model.parameters()), device), device)
    layout = Packed(groups, device)
    with layout_attention(model.config):
        outputs = model(input_ids=ids[None], position_ids=positions[None], use_cache=False, layout=layout)
    states = outputs.last_hidden_state[0]
    # Not [places]: threads would add the gradients of a shared token in any order, so runs would not be reproducible.
    return states if places is None else states.index_select(0, places)


def recompute_attention(config: PreTrainedConfig) -> AbstractContextManager[None]:
    """A context that restores the current attention when activation checkpointing recomputes a layer later."""
    by_layout = config._attn_implementation == ATTENTION_NAME
    return layout_attention(config) if by_layout else nullcontext()


@dataclass(frozen=True)
class _Block:
    """New tokens for the rows of a cache, packed, with any number per row.

    Attributes:
        rows: The row of each token.
        places: Each token's index among the new tokens of its row.
        columns: Each token's column in the cache.
        seen: The columns that each new token attends to; entries without a token are never read.
    """

    rows: Int[Tensor, " tokens"]
    places: Int[Tensor, " tokens"]
    columns: Int[Tensor, " tokens"]
    seen: Bool[Tensor, "rows 1 longest columns"]

    @classmethod
    def of(cls, starts: Int[Tensor, " rows"], ends: Int[Tensor, " rows"], counts: Int[Tensor, " rows"]) -> _Block:
        """Make the block that adds `counts` tokens to rows with columns from `starts` up to `ends`."""
        places = torch.arange(int(counts.max()), device=counts.device)
        rows, slots = (places < counts[:, None]).nonzero(as_tuple=True)
        columns = torch.arange(int((ends + counts).max()), device=counts.device)
        last = ends[:, None, None] + places[:, None]
        seen = (columns >= starts[:, None, None]) & (columns <= last)
        return cls(rows, slots, ends[rows] + slots, seen[:, None])


class KeyValues:
    """Keys and values of every layer and row: right-aligned prompts, then the responses so far.

    Rows may also grow by different amounts, from packed rows: see `advance_each`.

    It replaces both transformers' cache and the attention mask in a model's forward call. Prompts are read from packed
    rows; several rows may continue one prompt.

    Args:
        columns: For each row, the indices of its prompt's tokens among all tokens read, `[rows, width]`; −1 in the
            padding of shorter prompts.
        max_columns: Maximum width: the longest prompt plus its response.
        device: The kind of device that the attention is computed for.
    """

    def __init__(self, columns: Int[Tensor, "rows width"], max_columns: int, device: str) -> None:
        self.device = device
        self.length = columns.shape[1]
        self.max_columns = max_columns
        self._columns: Tensor | None = columns.clamp(min=0)
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._spans: tuple[Tensor, Tensor] | None = None  # the first column of each row, and the column after its last
        self._block: _Block | None = None
        hidden = columns < 0
        self._mask = None
        if hidden.any():
            width = -(-max_columns // MASK_STEP) * MASK_STEP
            mask = torch.zeros(columns.shape[0], 1, 1, width, device=columns.device)
            mask[:, 0, 0, : self.length] = mask[:, 0, 0, : self.length].masked_fill(hidden, -torch.inf)
            self._mask = mask

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns in use; part of the interface of a transformers cache."""
        return self.length

    def advance(self) -> None:
        """Add a column, which each layer's `update` then fills."""
        self._columns = None
        self.length += 1

    def advance_each(self, counts: Int[Tensor, " rows"]) -> None:
        """Add columns to the end of each row, which each layer's `update` then fills from packed rows.

        Args:
            counts: New tokens of each row, possibly 0. Afterwards, rows can only grow in this way.
        """
        starts, ends = self._row_spans(counts)
        self._block = _Block.of(starts, ends, counts)
        self._spans = starts, ends + counts
        self.length = self._block.seen.shape[-1]

    def cut(self, lengths: Int[Tensor, " rows"]) -> None:
        """Discard the tokens of each row from a length on; afterwards, rows can only grow by `advance_each`."""
        starts, _ = self._row_spans(lengths)
        self._spans = starts, starts + lengths

    def _row_spans(self, like: Int[Tensor, " rows"]) -> tuple[Tensor, Tensor]:
        """Each row's first column, and its end."""
        self._columns = None
        if self._spans is None:
            hidden = like.new_zeros(1, 1) if self._mask is None else self._mask[:, 0, 0, : self.length]
            self._spans = (hidden < 0).sum(dim=1).expand_as(like), torch.full_like(like, self.length)
            self._mask = None
        return self._spans

    def keep(self, rows: Int[Tensor, " kept"]) -> None:
        """Keep only these rows."""
        for layer in self._layers:  # layer by layer, so that only one is in memory twice
            keys, values = self._layers[layer]
            self._layers[layer] = (keys.index_select(0, rows), values.index_select(0, rows))
        if self._mask is not None:
            self._mask = self._mask.index_select(0, rows)
        if self._spans is not None:
            self._spans = self._spans[0][rows], self._spans[1][rows]

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Store new keys and values; return those to attend to: the prompts' own at first, later all columns so far."""
        if self._columns is not None:
            self._layers[layer_idx] = (self._read_prompts(key), self._read_prompts(value))
            return key, value
        keys, values = (
            self._append(buffer, states) for buffer, states in zip(self._layers[layer_idx], (key, value), strict=True)
        )
        self._layers[layer_idx] = (keys, values)
        return keys[:, :, : self.length], values[:, :, : self.length]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """Attend from each row's new tokens to its row, with shapes as in `Packed.attend`."""
        if (block := self._block) is None:
            if self._mask is not None:
                self._mask = self._mask.to(attention_dtype(query, self.device))
            mask = None if self._mask is None else self._mask[..., : self.length]
            return self._attend_one(query, key, value, mask, scaling)
        _, heads, _, dim = query.shape
        queries = query.new_zeros(len(key), block.seen.shape[2], heads, dim)
        queries[block.rows, block.places] = query[0].transpose(0, 1)
        queries = queries.transpose(1, 2)
        if block.seen.shape[2] == 1:
            outputs = self._attend_one(queries, key, value, block.seen, scaling)
        else:
            outputs = attend(queries, key, value, scaling=scaling, mask=block.seen, device=self.device).transpose(1, 2)
        return outputs[block.rows, block.places][None]

    def _attend_one(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None
    ) -> Tensor:
        """Attend from one token of each row.

        Query heads that share a key head are passed as query tokens, so that no key has to be copied.
        """
        rows, heads, _, dim = query.shape
        grouped = query.reshape(rows, key.shape[1], heads // key.shape[1], dim)
        attended = attend(grouped, key, value, scaling=scaling, mask=mask, device=self.device)
        return attended.reshape(rows, 1, heads, value.shape[-1])

    def _read_prompts(self, states: Tensor) -> Tensor:
        """Arrange `[1, heads, tokens, dim]` as `[rows, heads, columns, dim]`, with room for the response's start."""
        assert self._columns is not None
        capacity = min(self.length + MIN_GROWTH, self.max_columns)
        rows = self._columns.shape[0]
        heads = states.shape[1]
        dim = states.shape[-1]
        buffer = states.new_zeros(rows, heads, capacity, dim, dtype=attention_dtype(states, self.device))
        buffer[:, :, : self.length] = states[0][:, self._columns].transpose(0, 1)
        return buffer

    def _append(self, buffer: Tensor, states: Tensor) -> Tensor:
        """Write states to the last column, or to each token's own column, in a wider buffer if this one is full."""
        capacity = buffer.shape[2]
        if self.length > capacity:
            wider = max(self.length, min(capacity + max(MIN_GROWTH, capacity // 2), self.max_columns))
            buffer = nn.functional.pad(buffer, (0, 0, 0, wider - capacity))
        if self._block is None:
            buffer[:, :, self.length - 1 : self.length] = states
        else:
            buffer[self._block.rows, :, self._block.columns] = states[0].transpose(0, 1).to(buffer.dtype)
        return buffer


class PackedDecoder:
    """Decodes without padding; each distinct prompt is read once, however many rows continue it.

    Args:
        model: A trunk that supports layout attention.
        prompts: One per row.
        max_new_tokens: Maximum number of steps.
        shares: Read the common start of all prompts, such as the system prompt of a chat template, only once.
        arranged_for: The kind of device that the passes are arranged for; see `packed_states`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        shares: bool = False,
        arranged_for: str | None = None,
    ) -> None:
        self._model = model
        self._cache_name = cache_name_of(model)
        self.can_drop_rows = True
        device = next(model.parameters()).device
        kind = arranged_for or device.type
        distinct = {tuple(prompt): None for prompt in sorted(prompts, key=len, reverse=True)}
        numbers = {prompt: number for number, prompt in enumerate(distinct)}
        chosen = [numbers[tuple(prompt)] for prompt in prompts]
        width = max(map(len, distinct))
        rows = TokenRows.of(list(distinct), device, prefix_tree(list(distinct), longest=width) if shares else ())
        ids, positions, groups, places = lay_out(rows, attention_dtype(next(model.parameters()), kind), kind)
        columns, last = _columns(rows, width)[chosen].to(device), rows.last[chosen]
        if places is not None:
            columns, last = columns.where(columns < 0, places[columns]), places[last]
        self._positions = torch.tensor([len(prompt) for prompt in prompts], device=device)
        self._cache = KeyValues(columns, width + max_new_tokens, kind)
        self.hidden = self._run(ids[None], positions[None], layout=Packed(groups, kind))[0, last]

    def step(self, tokens: Tensor, running: Tensor | None = None) -> Tensor:
        """See `Decoder.step`."""
        if running is not None:
            return self._read(tokens[running], running.long())
        self._cache.advance()
        self.hidden = self._run(tokens[:, None], self._positions[:, None], layout=self._cache)[:, -1]
        self._positions = self._positions + 1
        return self.hidden

    def keep(self, rows: Tensor) -> None:
        """See `Decoder.keep`."""
        self._cache.keep(rows)
        self._positions = self._positions[rows]
        self.hidden = self.hidden[rows]

    def cut(self, lengths: Mapping[int, int]) -> None:
        """Forget the tokens of some rows from a length on; `extend` comes next."""
        for row, length in lengths.items():
            self._positions[row] = length
        self._cache.cut(self._positions)

    def extend(self, texts: Sequence[Sequence[int]]) -> Float[Tensor, "rows dim"]:
        """Read one or more tokens for each row; afterwards, `step` needs `running`.

        Returns:
            The hidden state at each row's last token, which is also kept in `hidden`.
        """
        added = TokenRows.of(texts, self.hidden.device)
        return self._read(added.ids, torch.tensor(added.lengths, device=self.hidden.device))

    def _read(self, ids: Int[Tensor, " tokens"], counts: Int[Tensor, " rows"]) -> Tensor:
        """Append packed tokens, `counts` per row; rows without new tokens keep their hidden state."""
        self._cache.advance_each(counts)
        first = counts.cumsum(0) - counts
        places = torch.arange(len(ids), device=ids.device) - first.repeat_interleave(counts)
        positions = self._positions.repeat_interleave(counts) + places
        hidden = self._run(ids[None], positions[None], layout=self._cache)[0]
        has = counts > 0
        self.hidden = self.hidden.index_put((has.nonzero().squeeze(1),), hidden[(first + counts - 1)[has]])
        self._positions = self._positions + counts
        return self.hidden

    def _run(self, ids: Tensor, positions: Tensor, *, layout: Packed | KeyValues) -> Tensor:
        with layout_attention(self._model.config):
            outputs = self._model(
                input_ids=ids, position_ids=positions, use_cache=True, layout=layout, **{self._cache_name: self._cache}
            )
        return outputs.last_hidden_state


def _columns(rows: TokenRows, width: int) -> Int[Tensor, "rows width"]:
    """Index of each row's tokens among all tokens, right-aligned; −1 in the padding of shorter rows."""
    starts = torch.tensor(rows.starts)[:, None]
    lengths = torch.tensor(rows.lengths)[:, None]
    places = torch.arange(width) - (width - lengths)
    return torch.where(places >= 0, starts + places, -1)


def cache_name_of(model: PreTrainedModel) -> str:
    """The name of a trunk's argument and output for the cache.

    Raises:
        ModelError: The trunk does not accept a cache.
    """
    inputs = inspect.signature(model.forward).parameters
    name = next((name for name in CACHE_NAMES if name in inputs), None)
    if name is None:
        raise ModelError(
            f"{type(model).__name__} has no key–value cache that kedge supports, so kedge cannot sample from it"
        )
    return name
