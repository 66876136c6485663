"""The key–value cache of rows that are sampled side by side."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor, nn

from kedge.models.packing.attention import attend, attention_dtype

__all__ = ["KeyValues"]

# Columns that the cache grows by at least: growing copies it, so it happens seldom.
MIN_GROWTH = 32


class KeyValues:
    """What every layer remembers of each row: prompts that end in the same column, then the response so far.

    It takes the place of transformers' cache in a model's forward call, and of the mask as well: it knows which columns
    a row has. Prompts are read from rows without padding; several rows may continue one prompt.

    Args:
        columns: For each row, where its prompt's tokens stand among the tokens that were read, `[rows, width]`; −1 in
            front of a shorter prompt.
        max_columns: The widest that it will ever be: the longest prompt and its response.
    """

    def __init__(self, columns: Int[Tensor, "rows width"], max_columns: int) -> None:
        self.length = columns.shape[1]
        self.max_columns = max_columns
        self._columns: Tensor | None = columns.clamp(min=0)
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        hidden = columns < 0
        self._mask = None
        if hidden.any():
            mask = torch.zeros(columns.shape[0], 1, 1, max_columns, device=columns.device)
            mask[:, 0, 0, : self.length] = mask[:, 0, 0, : self.length].masked_fill(hidden, -torch.inf)
            self._mask = mask

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns in use: part of what a transformers cache offers."""
        return self.length

    def advance(self) -> None:
        """One more column, which each layer's `update` is about to fill."""
        self._columns = None
        self.length += 1

    def keep(self, rows: Int[Tensor, " kept"]) -> None:
        """Forget all other rows."""
        self._layers = {
            layer: (keys.index_select(0, rows), values.index_select(0, rows))
            for layer, (keys, values) in self._layers.items()
        }
        if self._mask is not None:
            self._mask = self._mask.index_select(0, rows)

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Remember new keys and values; return those to attend to: the prompts' own, or all columns so far."""
        if self._columns is not None:
            self._layers[layer_idx] = (self._read_prompts(key), self._read_prompts(value))
            return key, value
        keys, values = (
            _write(buffer, states, self.length, self.max_columns)
            for buffer, states in zip(self._layers[layer_idx], (key, value), strict=True)
        )
        self._layers[layer_idx] = (keys, values)
        return keys[:, :, : self.length], values[:, :, : self.length]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """One new token per row looks back at its row; see `Layout.attend`.

        Query heads that share a key head stand in for query tokens, so that no key is copied.
        """
        rows, heads, _, dim = query.shape
        grouped = query.reshape(rows, key.shape[1], heads // key.shape[1], dim)
        mask = None if self._mask is None else self._mask[..., : self.length].to(attention_dtype(query))
        return attend(grouped, key, value, scaling=scaling, mask=mask).reshape(rows, 1, heads, value.shape[-1])

    def _read_prompts(self, states: Tensor) -> Tensor:
        """From `[1, heads, tokens, dim]` to `[rows, heads, columns, dim]`, with room for the response's start."""
        assert self._columns is not None
        capacity = min(self.length + MIN_GROWTH, self.max_columns)
        rows, heads, dim = self._columns.shape[0], states.shape[1], states.shape[-1]
        buffer = states.new_zeros(rows, heads, capacity, dim, dtype=attention_dtype(states))
        buffer[:, :, : self.length] = states[0][:, self._columns].transpose(0, 1)
        return buffer


def _write(buffer: Tensor, states: Tensor, length: int, max_columns: int) -> Tensor:
    """Put one column's states into the last column, in a wider buffer if this one is full."""
    capacity = buffer.shape[2]
    if length > capacity:
        wider = min(capacity + max(MIN_GROWTH, capacity // 2), max_columns)
        buffer = nn.functional.pad(buffer, (0, 0, 0, wider - capacity))
    buffer[:, :, length - 1] = states[:, :, 0]
    return buffer
