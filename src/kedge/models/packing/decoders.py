"""The interface of decoders, and those for models that cannot be packed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from kedge.data.tokens import pad_left
from kedge.models.packing.packed import cache_name_of

DecoderKind = Literal["padded", "grouped"]
DECODERS: tuple[DecoderKind, ...] = ("padded", "grouped")
"""Ways to sample from a model that cannot be packed, the faster one first."""


class Decoder(Protocol):
    """A batch of rows being sampled.

    Attributes:
        hidden: The hidden state at each row's last token.
        can_drop_rows: True if `keep` is supported.
    """

    hidden: Float[Tensor, "rows dim"]
    can_drop_rows: bool

    def step(
        self, tokens: Int[Tensor, " rows"], running: Bool[Tensor, " rows"] | None = None
    ) -> Float[Tensor, "rows dim"]:
        """Append one token per row; return its hidden state, which is also kept in `hidden`.

        Args:
            tokens: The tokens.
            running: False for rows without a token, which do not grow; None if all have one.
        """
        ...

    def keep(self, rows: Int[Tensor, " kept"]) -> None:
        """Keep only these rows."""
        ...


StartDecoder = Callable[[Sequence[Sequence[int]]], Decoder]
"""Creates a decoder that has read some prompts."""


class PaddedDecoder:
    """Decodes left-padded rows with the model's own cache, for models that cannot be packed.

    Args:
        model: A trunk.
        prompts: One per row.
        pad_id: Token id of the padding.
        takes_positions: The model accepts position ids.
        can_drop_rows: True if rows of the cache can be selected.

    Raises:
        ModelError: The model has no cache.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: Sequence[Sequence[int]],
        *,
        pad_id: int,
        takes_positions: bool,
        can_drop_rows: bool = True,
    ) -> None:
        self._model = model
        self._takes_positions = takes_positions
        self.can_drop_rows = can_drop_rows
        self._cache_name = cache_name_of(model)
        self._cache: Any = None
        device = next(model.parameters()).device
        ids, mask = pad_left(prompts, pad_id)
        self._mask = mask.to(device)
        self.hidden = self._run(ids.to(device))

    def step(self, tokens: Tensor, running: Tensor | None = None) -> Tensor:
        """See `Decoder.step`."""
        added = torch.ones_like(self._mask[:, :1]) if running is None else running[:, None]
        self._mask = torch.cat([self._mask, added], dim=1)
        self.hidden = self._run(tokens[:, None])
        return self.hidden

    def keep(self, rows: Tensor) -> None:
        """See `Decoder.keep`."""
        self._cache.reorder_cache(rows)
        self._mask = self._mask[rows]
        self.hidden = self.hidden[rows]

    def _run(self, ids: Tensor) -> Tensor:
        inputs: dict[str, Any] = {self._cache_name: self._cache}
        layers = self._cache.layers if isinstance(self._cache, Cache) else ()  # a model may have a cache of its own
        # A recurrent state has no columns to mask, so its mask is only passed with the prompt.
        if self._cache is None or any(isinstance(layer, CacheLayerMixin) for layer in layers):
            inputs["attention_mask"] = self._mask.long()
        if self._takes_positions:
            # Positions only count real tokens, so padding does not shift them (spec §2.3).
            inputs["position_ids"] = (self._mask.long().cumsum(dim=-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        outputs = self._model(input_ids=ids, use_cache=True, **inputs)
        self._cache = outputs[self._cache_name]
        return outputs.last_hidden_state[:, -1]


class GroupedDecoder:
    """Decodes rows with prompts of equal length together, for models whose states padding would change.

    Args:
        start: Creates the decoder of some prompts of equal length.
        prompts: One per row.
    """

    def __init__(self, start: StartDecoder, prompts: Sequence[Sequence[int]]) -> None:
        lengths = [len(prompt) for prompt in prompts]
        groups = [[row for row, length in enumerate(lengths) if length == each] for each in dict.fromkeys(lengths)]
        self._groups = [start([prompts[row] for row in rows]) for rows in groups]
        self._places = torch.tensor([row for rows in groups for row in rows], device=self._groups[0].hidden.device)
        self.can_drop_rows = all(group.can_drop_rows for group in self._groups)
        self._collect()

    def step(self, tokens: Tensor, running: Tensor | None = None) -> Tensor:
        """See `Decoder.step`."""
        goes_on = torch.ones_like(tokens, dtype=torch.bool) if running is None else running
        parts = (self._parts(entries[self._places]) for entries in (tokens, goes_on))
        for group, *part in zip(self._groups, *parts, strict=True):
            group.step(*part)
        return self._collect()

    def keep(self, rows: Tensor) -> None:
        """See `Decoder.keep`."""
        kept = torch.isin(self._places, rows)
        remaining = []
        for group, keeps in zip(self._groups, self._parts(kept), strict=True):
            if keeps.any():
                group.keep(keeps.nonzero().squeeze(1))
                remaining.append(group)
        # The index of each kept row among the kept rows.
        self._groups = remaining
        self._places = (self._places[kept][:, None] == rows).long().argmax(dim=1)
        self._collect()

    def _parts(self, entries: Tensor) -> tuple[Tensor, ...]:
        """Reorder entries by group, and split them into the groups."""
        return entries.split([len(group.hidden) for group in self._groups])

    def _collect(self) -> Tensor:
        hidden = torch.cat([group.hidden for group in self._groups])
        self.hidden = torch.empty_like(hidden).index_copy_(0, self._places, hidden)
        return self.hidden
