"""Wraps an advantage estimator that the user supplies, and checks the results of user functions."""

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
from kedge_base.errors import ConfigError, ShapeError
from kedge_base.machine.memory import is_out_of_memory
from kedge_base.texts import place_of, typed_error_text

LARGEST = 1e12
"""The largest allowed advantage or return: their sums and squares are computed in fp32, which ends at 3e38."""


@dataclass(frozen=True)
class OwnAdvantage:
    """An estimator `function(rewards, mask, values=…, group=…) → advantages, returns`; see `Advantage`.

    It gets copies of tensors `[batch, time]`, and of `group` `[batch]`; it may leave out the parameters after `mask`.
    `values` is None without a critic. Its results in masked slots are set to 0.

    Args:
        function: the estimator.
        gamma: γ, which other parts of the update use.
    """

    function: Callable[..., object]
    gamma: float
    needs: ClassVar[Need | None] = None

    @torch.no_grad()
    def __call__(self, rewards: Tensor, mask: Tensor, **inputs: Unpack[AdvantageInputs]) -> Advantages:
        """See `Advantage`; raises `ShapeError` for a wrong shape, or if finite inputs give a non-finite result."""
        known = {name: inputs.get(name) for name in taken_names(self.function)}
        copied = {name: None if value is None else value.clone() for name, value in known.items()}
        name = f"ppo.advantage: {function_name(self.function)}"
        found = call_own(name, self.function, rewards.clone(), mask.clone(), **copied)
        parts = tuple(cast("tuple[object, ...]", found)) if isinstance(found, (tuple, list)) else ()
        if len(parts) != 2:
            raise ShapeError(f"{name} returned {type(cast(object, found)).__name__}; expected (advantages, returns)")
        named = dict(zip(("advantages", "returns"), parts, strict=True))
        both = Advantages(*(own_values(value, mask, f"{name} returned {part}") for part, value in named.items()))
        # The guard reports NaN from the model itself.
        if all(each is None or each.isfinite().all() for each in (rewards, *known.values())):
            for part, value in zip(named, both, strict=True):
                if not (value.abs() <= LARGEST).all():
                    raise ShapeError(f"{name} returned {part} that are not finite, or beyond {LARGEST:g}")
        return both


def taken_names(function: Callable[..., object]) -> list[str]:
    """The arguments of an estimator after `rewards` and `mask` that a function takes."""
    parameters = signature(function).parameters
    kinds = [each.kind for each in parameters.values()]
    return [name for name in ("values", "group") if name in parameters or Parameter.VAR_KEYWORD in kinds]


def call_own(name: str, function: Callable[..., object], *inputs: Tensor, **named: Tensor | None) -> object:
    """Call a user's function; an error becomes one line with its location, unless memory ran out."""
    try:
        return function(*inputs, **named)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise ConfigError(f"{name} raised {typed_error_text(error)} ({place_of(error)})") from error


def own_values(value: object, mask: Tensor, name: str) -> Tensor:
    """Check the result of a user's function, and set masked slots to 0.

    Args:
        value: The result.
        mask: True = counts.
        name: The subject and verb of errors.

    Raises:
        ShapeError: The result is not a tensor with the mask's shape.
    """
    expected = f"expected a tensor of shape {tuple(mask.shape)}"
    if not isinstance(value, Tensor):
        raise ShapeError(f"{name} of type {type(value).__name__}; {expected}")
    if value.shape != mask.shape:
        raise ShapeError(f"{name} of shape {tuple(value.shape)}; {expected}")
    return keep_counted(value, mask)


def function_name(function: Callable[..., Any]) -> str:
    """A function's name in errors."""
    name = getattr(function, "__name__", type(function).__name__)
    return str(name).replace("<lambda>", "lambda_")
