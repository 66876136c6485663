"""Decoding without padding: the key–value cache, and rows that grow by one token or by several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from kedge.algorithm.prefixes import prefix_tree
from kedge.models.packing.decoders import cache_name_of
from kedge.models.packing.packed import (
    MASK_STEP,
    Layout,
    Packed,
    arrange,
    attend,
    attention_dtype,
    layout_attention,
    shared_layout,
)
from kedge.models.packing.rows import TokenRows

MIN_GROWTH: Final = 32
"""Minimum number of columns by which a key–value cache grows, because growing copies it."""


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
        self._spans: tuple[Tensor, Tensor] | None = None  # each row's first column, and its end
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
        places = {prompt: place for place, prompt in enumerate(distinct)}
        rows = TokenRows.of(list(distinct), device)
        chosen = [places[tuple(prompt)] for prompt in prompts]
        width = rows.longest
        columns = _columns(rows, width)[chosen].to(device)
        last = rows.last[chosen]
        ids, positions = rows.ids, rows.positions
        pieces = prefix_tree(list(distinct), longest=rows.longest) if shares else []
        if (arranged := arrange(rows.lengths, pieces)) is None:
            layout = Packed.of(rows, device=kind)
        else:
            read, places, layout = shared_layout(model, rows, arranged, kind)
            ids, positions = ids[read], positions[read]
            columns, last = columns.where(columns < 0, places[columns]), places[last]
        self._positions = torch.tensor([len(prompt) for prompt in prompts], device=device)
        self._cache = KeyValues(columns, width + max_new_tokens, kind)
        self.hidden = self._run(ids[None], positions[None], layout=layout)[0, last]

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

    def _run(self, ids: Tensor, positions: Tensor, *, layout: Layout) -> Tensor:
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
