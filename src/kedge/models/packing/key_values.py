"""Key–value cache for rows sampled in parallel."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor, nn

from kedge.models.packing.attention import attend, attention_dtype

__all__ = ["KeyValues"]

MIN_GROWTH = 32
"""Minimum number of columns added at a time, because growing copies the cache."""


class KeyValues:
    """Keys and values of every layer and row: right-aligned prompts, then the responses so far.

    It replaces both transformers' cache and the attention mask in a model's forward call. Prompts are read from packed
    rows; several rows may continue one prompt.

    Args:
        columns: For each row, the indices of its prompt's tokens among the tokens read, `[rows, width]`; −1 in the
            padding of shorter prompts.
        max_columns: Maximum width: the longest prompt plus its response.
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
        """Columns in use; part of the interface of a transformers cache."""
        return self.length

    def advance(self) -> None:
        """Add a column, which each layer's `update` then fills."""
        self._columns = None
        self.length += 1

    def keep(self, rows: Int[Tensor, " kept"]) -> None:
        """Keep only these rows."""
        for layer in self._layers:  # one after the other, so that only one layer exists twice
            keys, values = self._layers[layer]
            self._layers[layer] = (keys.index_select(0, rows), values.index_select(0, rows))
        if self._mask is not None:
            self._mask = self._mask.index_select(0, rows)

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Store new keys and values; return those to attend to: the prompts' own, or all columns so far."""
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
        """Attention of one new token per row over its row; see `Layout.attend`.

        Query heads that share a key head are passed as query tokens, so that no key is copied.
        """
        rows, heads, _, dim = query.shape
        grouped = query.reshape(rows, key.shape[1], heads // key.shape[1], dim)
        mask = None if self._mask is None else self._mask[..., : self.length].to(attention_dtype(query))
        return attend(grouped, key, value, scaling=scaling, mask=mask).reshape(rows, 1, heads, value.shape[-1])

    def _read_prompts(self, states: Tensor) -> Tensor:
        """From `[1, heads, tokens, dim]` to `[rows, heads, columns, dim]`, with room for the start of the response."""
        assert self._columns is not None
        capacity = min(self.length + MIN_GROWTH, self.max_columns)
        rows, heads, dim = self._columns.shape[0], states.shape[1], states.shape[-1]
        buffer = states.new_zeros(rows, heads, capacity, dim, dtype=attention_dtype(states))
        buffer[:, :, : self.length] = states[0][:, self._columns].transpose(0, 1)
        return buffer


def _write(buffer: Tensor, states: Tensor, length: int, max_columns: int) -> Tensor:
    """Write the states to the last column, in a wider buffer if this one is full."""
    capacity = buffer.shape[2]
    if length > capacity:
        wider = min(capacity + max(MIN_GROWTH, capacity // 2), max_columns)
        buffer = nn.functional.pad(buffer, (0, 0, 0, wider - capacity))
    buffer[:, :, length - 1] = states[:, :, 0]
    return buffer
