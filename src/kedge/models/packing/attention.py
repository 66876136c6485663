"""Attention over packed rows (no padding), registered as an attention implementation of transformers.

Embeddings, projections and norms run on real tokens only. Inside the attention, where rows must not see each other,
rows are arranged in rectangles again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
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
    "Packed",
    "UnsupportedAttention",
    "attend",
    "attention_dtype",
    "attention_of_accelerator",
    "group_by_length",
    "layout_attention",
    "recompute_attention",
]

ATTENTION_NAME = "kedge_layout"
MIN_FILL = 0.7
"""Smallest share of its rectangle's width that a row may fill; below it, padding costs more than a second call."""
UNSUPPORTED = ("softcap", "s_aux", "position_bias")


_on_accelerator: ContextVar[bool] = ContextVar("on_accelerator", default=False)


@contextmanager
def attention_of_accelerator() -> Iterator[None]:
    """Within this context, attention has an accelerator's number formats on every device, to plan its memory."""
    token = _on_accelerator.set(True)
    try:
        yield
    finally:
        _on_accelerator.reset(token)


class UnsupportedAttention(Exception):
    """The model's attention uses an unsupported feature, or never receives the layout."""


class Layout(Protocol):
    """Which tokens attend to which."""

    def attend(
        self,
        query: Float[Tensor, "batch heads tokens dim"],
        key: Float[Tensor, "batch kv_heads keys dim"],
        value: Float[Tensor, "batch kv_heads keys value_dim"],
        scaling: float | None,
    ) -> Float[Tensor, "batch tokens heads value_dim"]:
        """Softmax attention; the heads follow the tokens, as transformers expects."""
        ...


@dataclass(frozen=True)
class _Group:
    """Adjacent rows of similar length in a rectangle; `slots` maps tokens to places, None if the rectangle is full."""

    num_rows: int
    longest: int
    num_tokens: int
    slots: Int[Tensor, " tokens"] | None


@dataclass(frozen=True)
class Packed:
    """Rows end to end in one batch entry, with causal attention within each row.

    Rows are sorted by length, longest first; adjacent rows of similar length share a rectangle.
    """

    groups: tuple[_Group, ...]

    @classmethod
    def of(cls, rows: TokenRows) -> Packed:
        """The layout of rows sorted by length."""
        assert list(rows.lengths) == sorted(rows.lengths, reverse=True), "rows must be sorted by length, longest first"
        return cls(tuple(_group(lengths, rows.ids.device) for lengths in group_by_length(rows.lengths)))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """See `Layout.attend`."""
        sizes = [group.num_tokens for group in self.groups]
        queries, keys, values = (states[0].transpose(0, 1).split(sizes) for states in (query, key, value))
        parts = zip(self.groups, queries, keys, values, strict=True)
        return torch.cat([_attend_group(*part, scaling=scaling) for part in parts])[None]


def group_by_length(lengths: tuple[int, ...]) -> Iterator[list[int]]:
    """Split descending lengths where a row would fill less than `MIN_FILL` of its rectangle's width."""
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
    """Attention over `[tokens, heads, dim]`; padding comes after every real token, so the causal mask suffices."""

    def rectangle(states: Tensor) -> Tensor:
        filled = states if group.slots is None else _Scatter.apply(states, group.slots, group.num_rows * group.longest)
        return filled.reshape(group.num_rows, group.longest, *states.shape[1:]).transpose(1, 2)

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
    """Scaled dot-product attention, with grouped queries if there are fewer key heads than query heads."""
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
    """Number format of the attention: autocast's, but never bf16 on a CPU, where that kernel is slower."""
    device = states.device.type
    if _on_accelerator.get():
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype
    if device != "cpu" and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return torch.promote_types(states.dtype, torch.float32) if device == "cpu" else states.dtype


class _Scatter(torch.autograd.Function):
    """Copy tokens to their slots in a zero rectangle. Slots are distinct, so backward needs no sum."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, slots: Tensor, size: int) -> Tensor:
        """From `[tokens, …]` to `[size, …]`."""
        ctx.save_for_backward(slots)
        return states.new_zeros(size, *states.shape[1:]).index_copy_(0, slots, states)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Select the tokens' gradients."""
        (slots,) = ctx.saved_tensors
        return gradient.index_select(0, slots), None, None


class Gather(torch.autograd.Function):
    """Select distinct states: from a rectangle back to tokens, or tokens in another order."""

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
    """Within this context, the model with this configuration uses the layout passed to its forward call."""
    usual = config._attn_implementation
    config._attn_implementation = ATTENTION_NAME
    try:
        yield
    finally:
        config._attn_implementation = usual


def recompute_attention(config: PreTrainedConfig) -> AbstractContextManager[None]:
    """A context for a later recomputation (activation checkpointing): the attention that is in use now."""
    by_layout = config._attn_implementation == ATTENTION_NAME
    return layout_attention(config) if by_layout else nullcontext()
