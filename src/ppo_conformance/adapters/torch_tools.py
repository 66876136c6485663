"""What adapters of libraries on torch share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ppo_conformance.protocol import Array


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
    """The rows of each micro-batch; all in one if the case has none."""
    return settings.get("micro_batches") or [list(range(num_rows))]
