"""Token-by-token decoding with a key–value cache."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from kedge.data.tokens import pad_left
from kedge.errors import ModelError
from kedge.models.packing.attention import Packed, layout_attention
from kedge.models.packing.key_values import KeyValues
from kedge.models.packing.rows import TokenRows

__all__ = ["Decoder", "GroupedDecoder", "PackedDecoder", "PaddedDecoder"]

CACHE_NAMES: Final = ("cache", "cache_params", "past_key_values")
"""What a trunk's argument for its cache is called: by the first name from transformers 5.24 on."""


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
        self._model, self.can_drop_rows, self._cache_name = model, True, cache_name_of(model)
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
                input_ids=ids, position_ids=positions, use_cache=True, layout=layout, **{self._cache_name: self._cache}
            )
        return outputs.last_hidden_state


class PaddedDecoder:
    """Decodes left-padded rows with the model's own cache, for models that cannot be packed.

    Args:
        model: A trunk.
        prompts: One per row.
        pad_id: Token id of the padding.
        takes_positions: Whether the model accepts position ids.
        can_drop_rows: Whether rows of its cache can be selected.

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
        self._model, self._takes_positions, self.can_drop_rows = model, takes_positions, can_drop_rows
        self._cache_name = cache_name_of(model)
        self._cache: Any = None
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
        self._cache.reorder_cache(rows)
        self._mask, self.hidden = self._mask[rows], self.hidden[rows]

    def _run(self, ids: Tensor) -> Tensor:
        inputs: dict[str, Any] = {self._cache_name: self._cache}
        # A recurrent state has no columns to mask, so its mask is only passed with the prompt.
        if self._cache is None or _has_columns(self._cache):
            inputs["attention_mask"] = self._mask.long()
        if self._takes_positions:
            # Positions count real tokens only, so padding shifts nothing (spec §2.3).
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

    def __init__(self, start: Callable[[Sequence[Sequence[int]]], Decoder], prompts: Sequence[Sequence[int]]) -> None:
        lengths = [len(prompt) for prompt in prompts]
        groups = [[row for row, length in enumerate(lengths) if length == each] for each in dict.fromkeys(lengths)]
        self._groups = [start([prompts[row] for row in rows]) for rows in groups]
        self._places = torch.tensor([row for rows in groups for row in rows], device=self._groups[0].hidden.device)
        self.can_drop_rows = all(group.can_drop_rows for group in self._groups)
        self._collect()

    def step(self, tokens: Tensor) -> Tensor:
        """See `Decoder.step`."""
        for group, part in zip(self._groups, self._parts(tokens[self._places]), strict=True):
            group.step(part)
        return self._collect()

    def keep(self, rows: Tensor) -> None:
        """See `Decoder.keep`."""
        kept = torch.isin(self._places, rows)
        remaining = []
        for group, keeps in zip(self._groups, self._parts(kept), strict=True):
            if keeps.any():
                group.keep(keeps.nonzero().squeeze(1))
                remaining.append(group)
        # The place of each kept row among those that are kept.
        self._groups, self._places = remaining, (self._places[kept][:, None] == rows).long().argmax(dim=1)
        self._collect()

    def _parts(self, entries: Tensor) -> tuple[Tensor, ...]:
        """Entries in the groups' order, split into the groups."""
        return entries.split([len(group.hidden) for group in self._groups])

    def _collect(self) -> Tensor:
        hidden = torch.cat([group.hidden for group in self._groups])
        self.hidden = torch.empty_like(hidden).index_copy_(0, self._places, hidden)
        return self.hidden


def cache_name_of(model: PreTrainedModel) -> str:
    """The name of a trunk's argument, and of its output, for the cache.

    Raises:
        ModelError: It has none.
    """
    inputs = inspect.signature(model.forward).parameters
    name = next((name for name in CACHE_NAMES if name in inputs), None)
    if name is None:
        raise ModelError(
            f"{type(model).__name__} has no key–value cache that kedge supports, so kedge cannot sample from it"
        )
    return name


def _has_columns(cache: Any) -> bool:
    """Whether a cache keeps something per token of a row; recurrent states do not, nor caches of a model's own kind."""
    return isinstance(cache, Cache) and any(isinstance(layer, CacheLayerMixin) for layer in cache.layers)


def _columns(rows: TokenRows, width: int) -> Int[Tensor, "rows width"]:
    """Index of each row's tokens among all tokens, right-aligned; −1 in the padding of shorter rows."""
    starts, lengths = torch.tensor(rows.starts)[:, None], torch.tensor(rows.lengths)[:, None]
    places = torch.arange(width) - (width - lengths)
    return torch.where(places >= 0, starts + places, -1)
