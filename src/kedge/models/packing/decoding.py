"""Token-by-token decoding with a key–value cache."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kedge.data.tokens import pad_left
from kedge.errors import ModelError
from kedge.models.packing.attention import Packed, layout_attention
from kedge.models.packing.key_values import KeyValues
from kedge.models.packing.rows import TokenRows

__all__ = ["Decoder", "PackedDecoder", "PaddedDecoder"]


class Decoder(Protocol):
    """A batch of rows being sampled.

    Attributes:
        hidden: The hidden state at each row's last token.
        can_drop_rows: Whether `keep` is supported.
    """

    hidden: Float[Tensor, "rows dim"]
    can_drop_rows: bool

    def step(self, tokens: Int[Tensor, " rows"]) -> Float[Tensor, "rows dim"]:
        """Append one token per row; return its hidden state, which is also kept in `hidden`."""
        ...

    def keep(self, rows: Int[Tensor, " kept"]) -> None:
        """Keep only these rows."""
        ...


class PackedDecoder:
    """Decodes without padding; each distinct prompt is read once, however many rows continue it.

    Args:
        model: A trunk that supports layout attention.
        prompts: One per row.
        max_new_tokens: Maximum number of steps.
    """

    def __init__(self, model: PreTrainedModel, prompts: Sequence[Sequence[int]], *, max_new_tokens: int) -> None:
        self._model, self.can_drop_rows = model, True
        device = next(model.parameters()).device
        distinct = {tuple(prompt): None for prompt in sorted(prompts, key=len, reverse=True)}
        places = {prompt: place for place, prompt in enumerate(distinct)}
        rows = TokenRows.of(list(distinct), device)
        chosen = [places[tuple(prompt)] for prompt in prompts]
        width = rows.longest
        columns = _columns(rows, width)[chosen].to(device)
        self._positions = torch.tensor([len(prompt) for prompt in prompts], device=device)
        self._cache = KeyValues(columns, max_columns=width + max_new_tokens)
        hidden = self._run(rows.ids[None], rows.positions[None], layout=Packed.of(rows))[0]
        self.hidden = hidden[rows.last[chosen]]

    def step(self, tokens: Tensor) -> Tensor:
        """See `Decoder.step`."""
        self._cache.advance()
        self.hidden = self._run(tokens[:, None], self._positions[:, None], layout=self._cache)[:, -1]
        self._positions = self._positions + 1
        return self.hidden

    def keep(self, rows: Tensor) -> None:
        """See `Decoder.keep`."""
        self._cache.keep(rows)
        self._positions, self.hidden = self._positions[rows], self.hidden[rows]

    def _run(self, ids: Tensor, positions: Tensor, *, layout: Packed | KeyValues) -> Tensor:
        with layout_attention(self._model.config):
            outputs = self._model(
                input_ids=ids, position_ids=positions, past_key_values=self._cache, use_cache=True, layout=layout
            )
        return outputs.last_hidden_state


class PaddedDecoder:
    """Decodes left-padded rows with the cache of transformers, for models that cannot be packed.

    Args:
        model: A trunk.
        prompts: One per row.
        pad_id: Token id of the padding.
        takes_positions: Whether the model accepts position ids.

    Raises:
        ModelError: The model uses a cache of an unsupported kind.
    """

    def __init__(
        self, model: PreTrainedModel, prompts: Sequence[Sequence[int]], *, pad_id: int, takes_positions: bool
    ) -> None:
        self._model, self._takes_positions = model, takes_positions
        inputs = inspect.signature(model.forward).parameters
        # Only purely recurrent models use this name.
        self._recurrent = "cache_params" in inputs
        if not self._recurrent and "past_key_values" not in inputs:
            raise ModelError(
                f"{type(model).__name__} has no key–value cache that kedge supports, so kedge cannot sample from it"
            )
        self._cache = DynamicCache(config=model.config)
        # A recurrent layer's state cannot be selected by rows.
        self.can_drop_rows = all(isinstance(layer, DynamicLayer) for layer in self._cache.layers)
        device = next(model.parameters()).device
        ids, mask = pad_left(prompts, pad_id)
        self._mask = mask.to(device)
        self.hidden = self._run(ids.to(device))

    def step(self, tokens: Tensor) -> Tensor:
        """See `Decoder.step`."""
        self._mask = nn.functional.pad(self._mask, (0, 1), value=True)
        self.hidden = self._run(tokens[:, None])
        return self.hidden

    def keep(self, rows: Tensor) -> None:
        """See `Decoder.keep`."""
        self._cache.batch_select_indices(rows)
        self._mask, self.hidden = self._mask[rows], self.hidden[rows]

    def _run(self, ids: Tensor) -> Tensor:
        inputs: dict[str, Any] = {"cache_params" if self._recurrent else "past_key_values": self._cache}
        if self._takes_positions:
            # Positions count real tokens only, so padding shifts nothing (spec §2.3).
            inputs["position_ids"] = (self._mask.long().cumsum(dim=-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        if not self._recurrent or ids.shape == self._mask.shape:
            # A recurrent state has no columns to mask, so its mask is only passed with the prompt.
            inputs["attention_mask"] = self._mask.long()
        return self._model(input_ids=ids, use_cache=True, **inputs).last_hidden_state[:, -1]


def _columns(rows: TokenRows, width: int) -> Int[Tensor, "rows width"]:
    """Index of each row's tokens among all tokens, right-aligned; −1 in the padding of shorter rows."""
    starts, lengths = torch.tensor(rows.starts)[:, None], torch.tensor(rows.lengths)[:, None]
    places = torch.arange(width) - (width - lengths)
    return torch.where(places >= 0, starts + places, -1)
