"""Simulates a device like an Apple GPU on a CPU: no float64, and separate memory.

It has the name `meta`, since PyTorch knows `mps` only where it was built for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from kedge.algorithm import masking
from kedge.rollout import sampler
from kedge.runs import run
from kedge.stages import policy

DEVICE = torch.device("meta")


class OnApple(torch.Tensor):
    """A tensor on the device; its numbers are in the CPU's memory."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> OnApple:
        if held.dtype == torch.float64:
            raise TypeError("the device has no float64")
        layout = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        made = torch.Tensor._make_wrapper_subclass(cls, held.size(), device=DEVICE, **layout)
        made.held = held
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"OnApple({self.held})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        return _run(func, args, dict(kwargs or {}))


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the CPU, and put its results on the device if its arguments are, or it says so."""
    tensors = list(_tensors((args, *kwargs.values())))
    here = [each for each in tensors if isinstance(each, OnApple)]
    there = [each for each in tensors if each.ndim and not isinstance(each, OnApple)]
    name = func.__name__
    # Of the operations with indices, only `x[index]` takes them from the CPU's memory.
    takes_both = "copy" in name if "index" not in name else name.startswith(("index.", "index_put"))
    if here and there and not takes_both:
        raise RuntimeError(f"{func}: not all tensors are on the same device")
    if "index" in name and there and not isinstance(tensors[0], OnApple) and here:
        raise RuntimeError(f"{func}: a tensor on the CPU is indexed by one on the device")
    goes_here = bool(here)
    if kwargs.get("device") is not None:
        goes_here = torch.device(kwargs["device"]) == DEVICE
        kwargs["device"] = torch.device("cpu")
    found = func(*_mapped(_held, args), **{name: _mapped(_held, each) for name, each in kwargs.items()})
    if not goes_here:
        return found
    known = {id(each.held): each for each in here}  # operations in place return their argument

    def wrapped(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or isinstance(x, OnApple):
            return x
        return known[id(x)] if id(x) in known else OnApple(x)

    return _mapped(wrapped, found)


# torch's own functions for nested values took a third of the time of a run.
def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)([_mapped(change, each) for each in value])
    return change(value)


def _held(value: Any) -> Any:
    return value.held if isinstance(value, OnApple) else value


class _Factories(TorchDispatchMode):
    """Tensors that are made on the device, or copied to it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        return _run(func, args, dict(kwargs or {}))


class _Undispatched(TorchFunctionMode):
    """Operations that the dispatcher would not see, or sees too late."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and (device := kwargs.pop("device", None)) is not None:
            return func(*args, **kwargs).to(device)
        if args and isinstance(args[0], OnApple):
            if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
                index = args[1] if isinstance(args[1], tuple) else (args[1],)
                index = tuple(torch.tensor(each).to(DEVICE) if isinstance(each, list) else each for each in index)
                return func(args[0], index, *args[2:])
            if func is torch.Tensor.tolist:
                return args[0].held.tolist()
        return func(*args, **kwargs)


@contextmanager
def apple_gpu() -> Iterator[torch.device]:
    """Let runs of this thread use such a device."""
    is_enabled, autocast = torch.is_autocast_enabled, torch.autocast
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with (
            mock.patch("torch.is_autocast_enabled", lambda kind="cpu": kind != DEVICE.type and is_enabled(kind)),
            mock.patch("torch.autocast", lambda kind, **how: autocast("cpu" if kind == DEVICE.type else kind, **how)),
            mock.patch.object(masking, "WITHOUT_FLOAT64", {DEVICE.type}),
            mock.patch.object(sampler, "WITHOUT_FLOAT64", {DEVICE.type}),
            mock.patch.object(run, "resolve_device", return_value=DEVICE),
            mock.patch.object(policy, "resolve_device", return_value=DEVICE),
            _Factories(),
            _Undispatched(),
        ):
            yield DEVICE
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)
