"""Input checks of the algorithm's functions: one line each, cheap enough to stay enabled.

Under torch.compile only shapes and types are checked: numbers are not known while a graph is traced.
"""

from __future__ import annotations

import math
from typing import Any, get_args

import torch
from torch import Tensor

from kedge.errors import ConfigError, ShapeError

__all__ = ["check_choice", "check_counted", "check_finite", "check_positive", "check_same_shape", "check_share"]


def check_same_shape(**tensors: Tensor | None) -> None:
    """Reject tensors of different shapes, because broadcasting would hide the mistake. None is ignored."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if tensor is not None}
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ShapeError(f"shapes must be equal: {listed}")


def check_counted(mask: Tensor, **tensors: Tensor | None) -> None:
    """Reject a mask that is not boolean, counts nothing, or differs in shape from the tensors it masks."""
    check_same_shape(mask=mask, **tensors)
    if mask.dtype != torch.bool:
        raise ShapeError(f"mask must be boolean (True = counts), got {mask.dtype}")
    if not torch.compiler.is_compiling() and not mask.any():
        raise ShapeError(f"mask of shape {tuple(mask.shape)} counts nothing")


def check_choice(name: str, value: str, choices: Any) -> None:
    """Reject a value that is not in the `Literal` type `choices`."""
    allowed = get_args(choices)
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def check_finite(**numbers: float) -> None:
    """Reject infinite numbers and NaN."""
    if torch.compiler.is_compiling():
        return
    for name, number in numbers.items():
        if not math.isfinite(number):
            raise ConfigError(f"{name} must be a finite number, got {number}")


def check_share(**numbers: float) -> None:
    """Reject numbers outside [0, 1], and NaN."""
    for name, number in numbers.items():
        if not 0 <= number <= 1:
            raise ConfigError(f"{name} must be in [0, 1], got {number}")


def check_positive(**numbers: float) -> None:
    """Reject numbers that are zero, negative, infinite or NaN."""
    if torch.compiler.is_compiling():
        return
    check_finite(**numbers)
    for name, number in numbers.items():
        if number <= 0:
            raise ConfigError(f"{name} must be above 0, got {number}")
