"""The kinds of optimizers: their requirements and state per weight, and a wrapper for several optimizers.

| kind | state per weight of a matrix | from |
|---|---|---|
| adamw | 8 bytes | torch |
| adamw8bit | 2 bytes, and 8 per block of 256 | bitsandbytes |
| adafactor | 4 bytes per row and per column | transformers |
| muon | 4 bytes; 8 for all but matrices inside the model | torch |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor, nn

from kedge.models.frozen import load_bitsandbytes
from kedge_base.errors import ConfigError

OptimizerKind = Literal["adamw", "adamw8bit", "adafactor", "muon"]

SMALLEST_IN_8_BITS = 4096
"""Minimum size of a tensor whose moments are stored in 8 bits; the default of bitsandbytes."""

BLOCK = 256
"""Numbers per scale in bitsandbytes."""

CODES = {"qmap1": "dynamic", "qmap2": "udynamic"}
"""Entries of a parameter's bitsandbytes state that map 8 bits to 256 numbers, the same for all parameters."""


class Optimizer(Protocol):
    """The part of torch's optimizer interface that training uses."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameters with their settings, which may be changed."""
        ...

    @property
    def state(self) -> Mapping[Any, dict[str, Any]]:
        """The state of each parameter."""
        ...

    @property
    def step(self) -> Callable[[], Any]:
        """Take a step along the gradients."""
        ...

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The state, by the number of each parameter, and the groups."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore a `state_dict`."""
        ...


class OptimizersAsOne:
    """Several optimizers of different parameters, used as one; parameters are numbered across them.

    Args:
        parts: The optimizers.
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts = parts

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all parts."""
        return [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> dict[Any, dict[str, Any]]:
        """The state of each parameter."""
        return {parameter: state for part in self.parts for parameter, state in part.state.items()}

    def step(self) -> None:
        """Take a step with each optimizer."""
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients."""
        for part in self.parts:
            part.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The state of all parts, as a single optimizer's."""
        states: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        for first, part in self._numbered():
            own = part.state_dict()
            states |= {first + number: state for number, state in own["state"].items()}
            groups += [{**group, "params": [first + each for each in group["params"]]} for group in own["param_groups"]]
        return {"state": states, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a `state_dict`."""
        states = state_dict["state"]
        groups = list(state_dict["param_groups"])
        for first, part in self._numbered():
            count = sum(len(group["params"]) for group in part.param_groups)
            own = groups[: len(part.param_groups)]
            groups = groups[len(part.param_groups) :]
            part.load_state_dict(
                {
                    "state": {each - first: states[each] for each in range(first, first + count) if each in states},
                    "param_groups": [{**group, "params": [each - first for each in group["params"]]} for group in own],
                }
            )

    def _numbered(self) -> Iterable[tuple[int, torch.optim.Optimizer]]:
        """The parts, each with the number of its first parameter."""
        first = 0
        for part in self.parts:
            yield first, part
            first += sum(len(group["params"]) for group in part.param_groups)


def check_optimizer(kind: OptimizerKind, device: torch.device, *, named: str, is_sharded: bool = False) -> None:
    """Check that a kind of optimizer is available.

    Raises:
        ConfigError: A library is missing or too old, or the kind does not work on this device.
    """
    if kind != "adamw" and is_sharded:
        raise ConfigError(
            f"{named}={kind} needs whole matrices; with runtime.parallel=shard, whose ranks hold a part of all "
            f"moments each, use {named}=adamw"
        )
    if kind == "muon" and not hasattr(torch.optim, "Muon"):
        raise ConfigError(
            f"{named}=muon needs torch 2.9 or newer, this is {torch.__version__}; use adamw, adamw8bit or adafactor"
        )
    if kind == "adamw8bit":
        load_bitsandbytes(f"{named}=adamw8bit", device)


def state_shape(key: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of an entry of a parameter's state.

    Args:
        key: The entry's name in the library.
        shape: The parameter's shape.
    """
    if key in ("absmax1", "absmax2"):  # adamw8bit: scales
        return (-(-math.prod(shape) // BLOCK),)
    if key == "exp_avg_sq_row":  # adafactor
        return shape[:-1]
    if key == "exp_avg_sq_col":
        return (*shape[:-2], shape[-1])
    return shape


def share_codes(optimizer: Optimizer) -> None:
    """Add the entries shared by all parameters to a restored state of adamw8bit; nothing for other kinds.

    It must also be the same tensor: on a CPU, bitsandbytes creates a lookup table per tensor.
    """
    for parameter, state in optimizer.state.items():
        if "state1" in state and state["state1"].dtype == torch.uint8:
            known = cast(Any, optimizer).name2qmap
            for entry, name in CODES.items():
                known[name] = state[entry] = known[name].to(parameter.device)


def state_bytes(optimizer: Optimizer) -> dict[nn.Parameter, int]:
    """Compute the bytes that an optimizer keeps for each parameter after its first step.

    Step counts and the like, which do not grow with the parameter, are left out.
    """
    parts = optimizer.parts if isinstance(optimizer, OptimizersAsOne) else [optimizer]
    return {
        parameter: _bytes_kept(type(part).__name__, parameter)
        for part in parts
        for group in part.param_groups
        for parameter in group["params"]
    }


def _bytes_kept(kind: str, parameter: Tensor) -> int:
    count = parameter.numel()
    shape = tuple(parameter.shape)
    if kind == "Muon":
        return parameter.nbytes
    if kind == "AdamW8bit":
        return 8 * count if count < SMALLEST_IN_8_BITS else 2 * count + 8 * -(-count // BLOCK)
    if kind == "Adafactor":
        return 4 * (count // shape[-1] + count // shape[-2]) if len(shape) > 1 else 4 * count
    return 2 * parameter.nbytes
