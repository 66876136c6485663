"""What users write themselves: an advantage estimator in the form that the update calls, and checks of results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from typing_extensions import Unpack

from kedge.algorithm.advantages import AdvantageInputs, Advantages, Need
from kedge.algorithm.masking import keep_counted
from kedge_base.errors import ShapeError

LARGEST = 1e12
"""The largest advantage or return: their sums and squares are computed in fp32, which ends at 3e38."""


@dataclass(frozen=True)
class OwnAdvantage:
    """An estimator `function(rewards, mask, values=…, group=…) → advantages, returns`; see `Advantage`.

    It gets copies of tensors `[batch, time]`, and of `group` `[batch]`; it may leave out the parameters after `mask`.
    `values` is None without a critic. What it returns in masked slots is set to 0.

    Args:
        function: the estimator.
        gamma: γ of the other parts that discount.
    """

    function: Callable[..., object]
    gamma: float
    needs: ClassVar[Need | None] = None

    @torch.no_grad()
    def __call__(self, rewards: Tensor, mask: Tensor, **inputs: Unpack[AdvantageInputs]) -> Advantages:
        """See `Advantage`; raises `ShapeError` for another shape, or where finite numbers give one that is not."""
        known = {name: inputs.get(name) for name in ("values", "group")}
        parameters = signature(self.function).parameters
        if not any(each.kind == Parameter.VAR_KEYWORD for each in parameters.values()):
            known = {name: value for name, value in known.items() if name in parameters}
        copied = {name: None if value is None else value.clone() for name, value in known.items()}
        found = self.function(rewards.clone(), mask.clone(), **copied)
        name = f"ppo.advantage: {function_name(self.function)}"
        parts = tuple(cast("tuple[object, ...]", found)) if isinstance(found, (tuple, list)) else ()
        if len(parts) != 2:
            raise ShapeError(f"{name} returned a {type(cast(object, found)).__name__}; expected (advantages, returns)")
        named = dict(zip(("advantages", "returns"), parts, strict=True))
        both = Advantages(*(own_values(value, mask, f"{name} returned {part}") for part, value in named.items()))
        # The guard reports NaN that the model itself makes.
        given = [rewards, *(value for value in known.values() if value is not None)]
        if all(bool(each.isfinite().all()) for each in given):
            for part, value in zip(named, both, strict=True):
                if not bool((value.abs() <= LARGEST).all()):
                    raise ShapeError(f"{name} returned {part} that are not finite, or beyond {LARGEST:g}")
        return both


def own_values(value: object, mask: Tensor, name: str) -> Tensor:
    """A user's function's result, 0 in masked slots.

    Args:
        value: What it returned.
        mask: True = counts.
        name: Its name in errors, and a verb.

    Raises:
        ShapeError: It is not a tensor of this shape.
    """
    expected = f"expected a tensor of shape {tuple(mask.shape)}"
    if not isinstance(value, Tensor):
        raise ShapeError(f"{name} that are a {type(value).__name__}; {expected}")
    if value.shape != mask.shape:
        raise ShapeError(f"{name} of shape {tuple(value.shape)}; {expected}")
    return keep_counted(value, mask)


def function_name(function: Callable[..., Any]) -> str:
    """A function's name in errors."""
    name = getattr(function, "__name__", type(function).__name__)
    return str(name).replace("<lambda>", "lambda_")
