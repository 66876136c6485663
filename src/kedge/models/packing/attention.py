"""Attention over rows without padding, as one more implementation that transformers' models can be told to use.

A model that is run with it computes its embeddings, projections and norms for real tokens alone. Only here, inside of
the attention, where rows must not see each other, are they laid side by side again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, PreTrainedConfig

from kedge.models.packing.rows import TokenRows

__all__ = [
    "Gather",
    "Layout",
    "LayoutRefused",
    "Packed",
    "attend",
    "attention_dtype",
    "layout_attention",
    "like_lengths",
    "when_computed_again",
]

ATTENTION_NAME = "kedge_layout"
# Rows share a rectangle in which no row fills less than this; below it, the padding would cost more than a second call.
MIN_FILL = 0.7
# What a model may ask of its attention that is not offered here; such a model is run on padded rows.
NOT_OFFERED = ("softcap", "s_aux", "position_bias")


class LayoutRefused(Exception):
    """The model's attention needs what this one does not offer, or never receives the layout."""


class Layout(Protocol):
    """Who sees whom."""

    def attend(
        self,
        query: Float[Tensor, "batch heads tokens dim"],
        key: Float[Tensor, "batch kv_heads keys dim"],
        value: Float[Tensor, "batch kv_heads keys value_dim"],
        scaling: float | None,
    ) -> Float[Tensor, "batch tokens heads value_dim"]:
        """Softmax attention, the heads behind the tokens as transformers' models expect it."""
        ...


@dataclass(frozen=True)
class _Group:
    """Neighbouring rows of like length as one rectangle; `slots` says where each token stands, None: it is full."""

    num_rows: int
    longest: int
    num_tokens: int
    slots: Int[Tensor, " tokens"] | None


@dataclass(frozen=True)
class Packed:
    """Rows end to end in one batch entry, causal, each seeing itself alone.

    The longest rows come first; neighbours of like length are computed side by side.
    """

    groups: tuple[_Group, ...]

    @classmethod
    def of(cls, rows: TokenRows) -> Packed:
        """The layout of rows that are sorted by length."""
        assert list(rows.lengths) == sorted(rows.lengths, reverse=True), "the longest rows come first"
        return cls(tuple(_group(lengths, rows.ids.device) for lengths in like_lengths(rows.lengths)))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """See `Layout.attend`."""
        sizes = [group.num_tokens for group in self.groups]
        queries, keys, values = (states[0].transpose(0, 1).split(sizes) for states in (query, key, value))
        parts = zip(self.groups, queries, keys, values, strict=True)
        return torch.cat([_attend_group(*part, scaling=scaling) for part in parts])[None]


def like_lengths(lengths: tuple[int, ...]) -> Iterator[list[int]]:
    """Cut descending lengths where a row would fill less than `MIN_FILL` of its rectangle's width."""
    group: list[int] = []
    for length in lengths:
        if group and length < MIN_FILL * group[0]:
            yield group
            group = []
        group.append(length)
    yield group


def _group(lengths: list[int], device: torch.device) -> _Group:
    longest, num_tokens = lengths[0], sum(lengths)
    full = len(list(groupby(lengths))) == 1
    mask = torch.arange(longest) < torch.tensor(lengths)[:, None]
    slots = None if full else mask.flatten().nonzero().squeeze(1).to(device)
    return _Group(len(lengths), longest, num_tokens, slots)


def _attend_group(group: _Group, query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None) -> Tensor:
    """Attention of `[tokens, heads, dim]`; what follows a row's end is in nobody's past, so the causal mask is all."""

    def rectangle(states: Tensor) -> Tensor:
        spread = states if group.slots is None else _Spread.apply(states, group.slots, group.num_rows * group.longest)
        return spread.reshape(group.num_rows, group.longest, *states.shape[1:]).transpose(1, 2)

    outputs = attend(rectangle(query), rectangle(key), rectangle(value), scaling=scaling, is_causal=True)
    outputs = outputs.transpose(1, 2).flatten(0, 1)
    return outputs if group.slots is None else Gather.apply(outputs, group.slots)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float | None,
    is_causal: bool = False,
    mask: Tensor | None = None,
) -> Tensor:
    """Scaled dot-product attention; few key heads may serve many query heads."""
    device = query.device.type
    dtype = attention_dtype(query)
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    with torch.autocast(device, enabled=False):
        return nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=is_causal,
            scale=scaling,
            enable_gqa=key.shape[1] != query.shape[1],
        )


def attention_dtype(states: Tensor) -> torch.dtype:
    """The format attention runs in: autocast's, but on a processor never bf16, whose kernel is slower there."""
    device = states.device.type
    if device != "cpu" and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return torch.promote_types(states.dtype, torch.float32) if device == "cpu" else states.dtype


class _Spread(torch.autograd.Function):
    """Tokens to their slots in an empty rectangle. Each slot has one token: no sum is needed on the way back."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, slots: Tensor, size: int) -> Tensor:
        """From `[tokens, …]` to `[size, …]`."""
        ctx.save_for_backward(slots)
        return states.new_zeros(size, *states.shape[1:]).index_copy_(0, slots, states)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Choose the tokens' gradients."""
        (slots,) = ctx.saved_tensors
        return gradient.index_select(0, slots), None, None


class Gather(torch.autograd.Function):
    """Choose states, none of them twice: the way back from the rectangle, or another order of the tokens."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, slots: Tensor) -> Tensor:
        """From `[size, …]` to `[tokens, …]`."""
        ctx.save_for_backward(slots)
        ctx.size = states.shape[0]
        return states.index_select(0, slots)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Spread the tokens' gradients."""
        (slots,) = ctx.saved_tensors
        return gradient.new_zeros(ctx.size, *gradient.shape[1:]).index_copy_(0, slots, gradient), None


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
    """What transformers' attention modules call."""
    wanted = [name for name in NOT_OFFERED if settings.get(name) is not None]
    if layout is None or attention_mask is not None or wanted:
        raise LayoutRefused(f"{type(module).__name__}: {wanted or 'no layout reaches its attention'}")
    return layout.attend(query, key, value, scaling), None


AttentionInterface.register(ATTENTION_NAME, _by_layout)


@contextmanager
def layout_attention(config: PreTrainedConfig) -> Iterator[None]:
    """Inside, the model of this configuration attends by the layout that its forward call is given."""
    usual = config._attn_implementation
    config._attn_implementation = ATTENTION_NAME
    try:
        yield
    finally:
        config._attn_implementation = usual


def when_computed_again(config: PreTrainedConfig) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """For activation checkpointing: what is computed again in the backward pass attends as it did at first."""
    by_layout = config._attn_implementation == ATTENTION_NAME
    return nullcontext(), layout_attention(config) if by_layout else nullcontext()
