"""Converts a run's state to tensors and JSON and back: weights, optimizer state, random streams."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kedge.errors import ModelError, NumericsError
from kedge.models.adapters import is_frozen
from kedge.system.ranks.sharding import StoredTensors, part_for, whole
from kedge.training.host_state import unwrapped
from kedge.training.optimizer_kinds import CODES, Optimizer, share_codes, state_shape

__all__ = [
    "check_state",
    "module_tensors",
    "optimizer_state",
    "random_state",
    "restore_module",
    "restore_optimizer",
    "restore_random_state",
]

MOVING = ("lr", "tf1_step")
"""Entries of a parameter group that steps change; the others come from the configuration and are not restored."""


def check_state(value: Any, name: str = "state") -> None:
    """Check that a value survives a round trip through JSON unchanged: no tuples, no NaN.

    Raises:
        TypeError: It contains something other than dicts with string keys, lists, strings, numbers, bools and None.
        NumericsError: A number is not finite.
    """
    if isinstance(value, float) and not math.isfinite(value):
        raise NumericsError(f"{name} is {value}; only finite numbers can be saved")
    if type(value) is dict and all(type(key) is str for key in value):
        for key, entry in value.items():
            check_state(entry, f"{name}.{key}")
    elif type(value) is list:
        for index, entry in enumerate(value):
            check_state(entry, f"{name}[{index}]")
    elif value is not None and type(value) not in (str, int, float, bool):
        raise TypeError(f"{name} is a {type(value).__name__}, which JSON cannot represent unchanged")


def module_tensors(module: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers of a module by name; shared ones appear once, those under an adapter not at all."""
    weights = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: weight for name, weight in weights.items() if not is_frozen(weight)}


@torch.no_grad()
def restore_module(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Overwrite parameters and buffers in place, so that an optimizer keeps referring to them.

    Raises:
        ModelError: Names, a shape or a dtype differ; nothing has been overwritten.
    """
    own = module_tensors(module)
    for name in sorted(own.keys() ^ tensors.keys()):
        raise ModelError(f"the checkpoint's weights do not match the model: {name} is only in one of them")
    for name, tensor in own.items():
        _check_same_kind(name, tensors, tensor)
    for name, tensor in own.items():
        tensor.copy_(part_for(tensors, name, tensor))


def optimizer_state(
    optimizer: Optimizer, *, gathered: bool = True, keep: bool = True
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An optimizer's state: tensors by `PARAMETER.KEY`, and the entries of its parameter groups that steps change.

    Parameters are numbered across groups, as in torch's state dict. A parameter without a step has no state. Counts
    that are no tensors become one. What is sharded over ranks is gathered, in the memory of the host: all of them call
    this.

    Args:
        optimizer: The optimizer.
        gathered: False to leave what is sharded as it is.
        keep: False for a rank that only helps others to gather: it returns no tensors.
    """
    tensors: dict[str, Tensor] = {}
    kept = optimizer.state
    for index, parameter in enumerate(_parameters(optimizer)):
        for key, value in kept.get(parameter, {}).items():
            if key in CODES:
                continue
            value = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.int64)
            found = whole(value) if gathered else value
            if keep:
                tensors[f"{index}.{key}"] = found if found is value else found.cpu()
    groups = [
        {"num_parameters": len(group["params"]), **{key: group[key] for key in MOVING if key in group}}
        for group in optimizer.param_groups
    ]
    return tensors, {"groups": groups}


def restore_optimizer(optimizer: Optimizer, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Restore a saved state into an optimizer of the same parameters in the same groups.

    Raises:
        ModelError: The groups or a parameter's shape differ.
    """
    groups, saved = optimizer.state_dict()["param_groups"], state["groups"]
    sizes, saved_sizes = [len(group["params"]) for group in groups], [group["num_parameters"] for group in saved]
    if sizes != saved_sizes:
        raise ModelError(
            f"the checkpoint's optimizer does not match: its groups have {saved_sizes} parameters, expected {sizes}"
            + ("; another version of kedge grouped them; start anew" if sum(sizes) == sum(saved_sizes) else "")
        )
    parameters = _parameters(optimizer)
    restored: dict[int, dict[str, Any]] = {}
    for name in tensors:
        index, _, key = name.partition(".")
        own, (shape, dtype) = parameters[int(index)], _kind(tensors, name)
        expected = state_shape(key, tuple(own.shape))
        if shape and shape != expected:
            raise ModelError(
                f"the checkpoint's optimizer does not match: {name} is {list(shape)}, expected {list(expected)}"
            )
        found = part_for(tensors, name, own) if shape else tensors[name]
        restored.setdefault(int(index), {})[key] = found if shape or dtype != torch.int64 else int(found)
    moved = [
        {**group, **{key: old[key] for key in MOVING if key in old}} for group, old in zip(groups, saved, strict=True)
    ]
    optimizer.load_state_dict({"state": restored, "param_groups": moved})
    _undo_casts(optimizer, restored)
    share_codes(unwrapped(optimizer))


def _undo_casts(optimizer: Optimizer, restored: Mapping[int, Mapping[str, Any]]) -> None:
    """Torch gives every moment the parameter's number format; some libraries keep another one."""
    kept = optimizer.state
    for index, parameter in enumerate(_parameters(optimizer)):
        for key, value in restored.get(index, {}).items():
            if isinstance(value, Tensor) and kept[parameter][key].dtype != value.dtype:
                kept[parameter][key] = value.to(kept[parameter][key].device)


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    """All parameters, across groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def random_state() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """State of the global generators of torch, Python and NumPy, any of which a user's functions may use."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    tensors = {"cpu": torch.get_rng_state(), **{f"cuda:{index}": state for index, state in enumerate(cuda)}}
    version, words, gauss = random.getstate()
    name, keys, *rest = np.random.get_state()
    return tensors, {"python": [version, list(words), gauss], "numpy": [name, np.asarray(keys).tolist(), *rest]}


def restore_random_state(tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Restore the global generators."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(tensors["cpu"])
    for index in range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0):
        if f"cuda:{index}" in tensors:
            torch.cuda.set_rng_state(tensors[f"cuda:{index}"], index)


def _check_same_kind(name: str, tensors: Mapping[str, Tensor], own: Tensor) -> None:
    shape, dtype = _kind(tensors, name)
    if (shape, dtype) != (tuple(own.shape), own.dtype):
        raise ModelError(
            f"the checkpoint's weights do not match the model: {name} is {list(shape)} {dtype}, "
            f"expected {list(own.shape)} {own.dtype}"
        )


def _kind(tensors: Mapping[str, Tensor], name: str) -> tuple[tuple[int, ...], torch.dtype]:
    """A tensor's shape and number format; a stored one is not read for that."""
    if isinstance(tensors, StoredTensors):
        return tensors.shape(name), tensors.dtype(name)
    return tuple(tensors[name].shape), tensors[name].dtype
