"""Weights under adapters: they never change, and several models can share them."""

from __future__ import annotations

import copy
from typing import TypeVar

from torch import Tensor, nn

__all__ = ["is_frozen", "mark_frozen", "shared_copy"]

M = TypeVar("M", bound=nn.Module)


def mark_frozen(weight: Tensor) -> None:
    """Say that a weight never changes, so that checkpoints leave it out, and copies share it."""
    weight.requires_grad_(False)
    weight.is_frozen = True  # pyright: ignore[reportAttributeAccessIssue]


def is_frozen(weight: Tensor) -> bool:
    """Whether a weight was marked; `requires_grad` alone can be off for a while."""
    return getattr(weight, "is_frozen", False)


def shared_copy(module: M, *, only_frozen: bool = False) -> M:
    """A module with parts of its own whose weights and buffers are those of another: nothing in memory is copied.

    Args:
        module: The other.
        only_frozen: Copy the weights that were not marked as frozen.
    """
    shared = [*module.parameters(), *module.buffers()]
    return copy.deepcopy(module, {id(each): each for each in shared if is_frozen(each) or not only_frozen})
