"""Runs a transformer without its head on real tokens only: packed where its attention allows, else padded."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from kedge.models.packing.attention import (
    Gather,
    Packed,
    UnsupportedAttention,
    group_by_length,
    layout_attention,
    recompute_contexts,
)
from kedge.models.packing.decoding import Decoder, PackedDecoder, PaddedDecoder
from kedge.models.packing.rows import TokenRows
from kedge.models.pretrained import quiet_transformers

__all__ = ["Trunk"]

WINDOW_LIMITS = ("sliding_window", "attention_chunk_size")
"""Settings that restrict a model's attention beyond causality for rows longer than their value."""


class Trunk:
    """The trunk of a policy, reference, critic or reward model.

    The constructor checks once, on a few tokens, that packing gives the same states as padding. A model whose layers
    carry state along the sequence, or that has its own attention, runs on padded rows of similar length instead.

    Args:
        model: A transformers model without its head (`base_model`).
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.checkpointing = False
        config = model.config.get_text_config()
        self._reach = min(
            (int(limit) for name in WINDOW_LIMITS if (limit := getattr(config, name, None))), default=None
        )
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self._packs = self._takes_positions and self._packing_works()

    def packs(self, longest: int) -> bool:
        """Whether rows up to this length are packed."""
        return self._packs and (self._reach is None or longest <= self._reach)

    def checkpoint_activations(self) -> None:
        """Enable activation checkpointing: the backward pass recomputes the activations inside the layers."""
        contexts = partial(recompute_contexts, self.model.config)
        self.model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
        self.checkpointing = True

    def hidden(self, rows: TokenRows) -> Float[Tensor, "tokens dim"]:
        """The last hidden state of every token, in the order of `rows`; rows do not see each other."""
        order = rows.order()
        if order == list(range(len(order))):
            return self._hidden_sorted(rows)
        taken = rows.token_indices(order)
        hidden = self._hidden_sorted(TokenRows(rows.ids[taken], tuple(rows.lengths[row] for row in order)))
        return Gather.apply(hidden, taken.argsort())

    def decoder(self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, pad_id: int) -> Decoder:
        """A decoder that has read the prompts (at least one token each)."""
        longest = max(map(len, prompts)) + max_new_tokens
        if self.packs(longest):
            return PackedDecoder(self.model, prompts, max_new_tokens=max_new_tokens)
        return PaddedDecoder(self.model, prompts, pad_id=pad_id, takes_positions=self._takes_positions)

    def _hidden_sorted(self, rows: TokenRows) -> Tensor:
        if self.packs(rows.longest):
            with layout_attention(self.model.config):
                return self._run(rows.ids[None], position_ids=rows.positions[None], layout=Packed.of(rows))[0]
        parts, start = [], 0
        for lengths in group_by_length(rows.lengths):
            end = start + sum(lengths)
            parts.append(self._hidden_padded(TokenRows(rows.ids[start:end], tuple(lengths))))
            start = end
        return torch.cat(parts)

    def _hidden_padded(self, rows: TokenRows) -> Tensor:
        ids, mask = rows.pad()
        positions = {"position_ids": torch.arange(rows.longest, device=ids.device)[None]}
        return self._run(ids, attention_mask=mask.long(), **(positions if self._takes_positions else {}))[mask]

    def _run(self, ids: Tensor, **inputs: Any) -> Tensor:
        checkpointing = self.checkpointing and torch.is_grad_enabled()
        # transformers checkpoints in training mode only; dropout is 0 in either mode.
        self.model.train(checkpointing)
        try:
            return self.model(input_ids=ids, use_cache=False, **inputs).last_hidden_state
        finally:
            self.model.eval()

    @torch.no_grad()
    def _packing_works(self) -> bool:
        """Whether packed and padded passes over three short rows agree, and a decoding step with them."""
        device = next(self.model.parameters()).device
        rows = TokenRows.of([[0, 1, 2, 3], [3, 2, 1], [2, 0]], device)
        self._packs = True
        with quiet_transformers():
            expected = self._hidden_padded(rows)
            try:
                packed = self._hidden_sorted(rows)
                decoder = PackedDecoder(self.model, [[0, 1, 2], [3, 2]], max_new_tokens=1)
                decoded = decoder.step(torch.tensor([3, 1], device=device))
            except (UnsupportedAttention, TypeError, AttributeError, NotImplementedError, RuntimeError, ValueError):
                return False
        ours, theirs = torch.cat([packed, decoded]), torch.cat([expected, expected[[3, 6]]])
        return torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max()))
