"""Helpers for adapters of libraries that use torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ppo_conformance.protocol import Array, NotOffered

UNBOUNDED = 1e9
"""Replaces a clip that a library cannot turn off."""


def tensors(*arrays: Any) -> list[torch.Tensor]:
    """Copies of arrays as tensors."""
    return [torch.tensor(array) for array in arrays]


def value_and_gradient(function: Callable[[torch.Tensor], torch.Tensor], array: Array) -> tuple[Any, Array]:
    """Return a function's value and the gradient of its sum, by autograd.

    The value is a number if the function's is one. Without a gradient, as where everything is clipped, it is 0.
    """
    x = torch.tensor(array, requires_grad=True)
    value = function(x)
    if value.requires_grad:
        value.sum().backward()
    gradient = np.zeros_like(array) if x.grad is None else x.grad.numpy()
    found = value.detach().numpy()
    return (float(found) if found.ndim == 0 else found), gradient


def micro_batches(settings: Any, num_rows: int) -> list[list[int]]:
    """The rows of each micro-batch; a single one if the case does not split them."""
    return settings.get("micro_batches") or [list(range(num_rows))]


def sum_over_batches(
    term: Callable[[torch.Tensor, list[int]], torch.Tensor], array: Array, settings: Any
) -> tuple[Any, Array]:
    """Return the sum of a term over micro-batches, and its gradient; the term gets a part of the array and its rows."""
    parts = micro_batches(settings, len(array))
    return value_and_gradient(lambda x: torch.stack([term(x[rows], rows) for rows in parts]).sum(), array)


def num_ranks(settings: Any) -> int:
    """The number of ranks that share the micro-batches."""
    return len({*settings.get("ranks", [0])})


def by_group(groups: Any, least: int = 2) -> tuple[Any, int]:
    """The order in which the rows of each group follow each other, and the size of all groups.

    Raises:
        NotOffered: The sizes differ, or are below the least that the library can compare.
    """
    first, *others = np.unique(groups, return_counts=True)[1].tolist()
    if first < least or any(size != first for size in others):
        raise NotOffered(f"groups have one size, above {least - 1}")
    return np.argsort(groups, kind="stable"), first
