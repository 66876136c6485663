"""What a run is made of, as tensors and JSON, and back: weights, Adam's moments, random streams."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from kedge.errors import ModelError, NumericsError

__all__ = [
    "check_state",
    "generator_tensors",
    "module_tensors",
    "optimizer_state",
    "random_state",
    "restore_generators",
    "restore_module",
    "restore_optimizer",
    "restore_random_state",
]

MOVING = ("lr", "tf1_step")
"""What a step changes in a parameter group; all else in it is configured, and stays as the optimizer was built."""


def check_state(value: Any, name: str = "state") -> None:
    """Make sure that a value comes back from JSON as it is: no tuple that turns into a list, no NaN.

    Raises:
        TypeError: It is not made of dicts with text keys, lists, texts, numbers, bools and None.
        NumericsError: A number is not finite.
    """
    if isinstance(value, float) and not math.isfinite(value):
        raise NumericsError(f"{name} is {value}: a run is not saved in such a state")
    if type(value) is dict and all(type(key) is str for key in value):
        for key, entry in value.items():
            check_state(entry, f"{name}.{key}")
    elif type(value) is list:
        for index, entry in enumerate(value):
            check_state(entry, f"{name}[{index}]")
    elif value is not None and type(value) not in (str, int, float, bool):
        raise TypeError(f"{name} is a {type(value).__name__}, which JSON does not give back as it is")


def module_tensors(module: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers of a module by name, one that is used in two places once."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


@torch.no_grad()
def restore_module(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Overwrite parameters and buffers in place, so that an optimizer of them goes on holding them.

    Raises:
        ModelError: The names, a shape or a dtype is another one; nothing has been overwritten.
    """
    own = module_tensors(module)
    for name in sorted(own.keys() ^ tensors.keys()):
        raise ModelError(f"the checkpoint's weights do not fit the model: {name} is in one of them only")
    for name, tensor in own.items():
        _check_alike(name, tensors[name], tensor)
    for name, tensor in own.items():
        tensor.copy_(tensors[name])


def optimizer_state(optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What an optimizer has gathered: tensors by `PARAMETER.KEY`, and what moves in its parameter groups.

    Parameters are numbered through all groups, as in torch's state dict. One that has not had a step has nothing.
    """
    gathered = optimizer.state_dict()
    tensors = {f"{index}.{key}": value for index, state in gathered["state"].items() for key, value in state.items()}
    groups = [
        {"num_parameters": len(group["params"]), **{key: group[key] for key in MOVING if key in group}}
        for group in gathered["param_groups"]
    ]
    return tensors, {"groups": groups}


def restore_optimizer(optimizer: Optimizer, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Let a new optimizer of the same parameters, in the same groups, go on where the saved one was.

    Raises:
        ModelError: The groups or a parameter's shape are others.
    """
    groups, saved = optimizer.state_dict()["param_groups"], state["groups"]
    sizes, saved_sizes = [len(group["params"]) for group in groups], [group["num_parameters"] for group in saved]
    if sizes != saved_sizes:
        raise ModelError(
            f"the checkpoint's optimizer does not fit: its groups have {saved_sizes} parameters, here they have {sizes}"
        )
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gathered: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        index, _, key = name.partition(".")
        if tensor.ndim and tensor.shape != parameters[int(index)].shape:
            shape = list(parameters[int(index)].shape)
            raise ModelError(f"the checkpoint's optimizer does not fit: {name} is {list(tensor.shape)}, not {shape}")
        gathered.setdefault(int(index), {})[key] = tensor
    moved = [
        {**group, **{key: old[key] for key in MOVING if key in old}} for group, old in zip(groups, saved, strict=True)
    ]
    optimizer.load_state_dict({"state": gathered, "param_groups": moved})


def generator_tensors(generators: Mapping[str, torch.Generator]) -> dict[str, Tensor]:
    """Where each random stream is."""
    return {name: generator.get_state() for name, generator in generators.items()}


def restore_generators(generators: Mapping[str, torch.Generator], tensors: Mapping[str, Tensor]) -> None:
    """Set each random stream to where it was."""
    for name, generator in generators.items():
        generator.set_state(tensors[name])


def random_state() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Where the global generators of torch, Python and NumPy are: a user's functions may draw from any of them."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    tensors = {"cpu": torch.get_rng_state(), **{f"cuda:{index}": state for index, state in enumerate(cuda)}}
    version, words, gauss = random.getstate()
    name, keys, *rest = np.random.get_state()
    return tensors, {"python": [version, list(words), gauss], "numpy": [name, np.asarray(keys).tolist(), *rest]}


def restore_random_state(tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Set the global generators to where they were."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(tensors["cpu"])
    for index in range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0):
        if f"cuda:{index}" in tensors:
            torch.cuda.set_rng_state(tensors[f"cuda:{index}"], index)


def _check_alike(name: str, saved: Tensor, own: Tensor) -> None:
    if (saved.shape, saved.dtype) != (own.shape, own.dtype):
        raise ModelError(
            f"the checkpoint's weights do not fit the model: {name} is {list(saved.shape)} {saved.dtype}, "
            f"not {list(own.shape)} {own.dtype}"
        )
