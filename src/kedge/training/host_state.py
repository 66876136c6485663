"""An optimizer wrapper that keeps the state in host memory between steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kedge.training.optimizer_kinds import CODES, Optimizer

AT_A_TIME = 2**28
"""Bytes of trained weights whose state is on the device at a time; a larger parameter is handled alone."""


class HostState:
    """Takes an optimizer's steps a few parameters at a time, and keeps their state in host memory in between.

    These optimizers change each parameter using only its own gradient and state, so steps on subsets of the parameters
    add up to a step on all of them.

    Args:
        inner: The optimizer.
        at_a_time: Bytes of weights that take a step together.
        to_host: Copies a tensor to the host's memory.
    """

    def __init__(
        self, inner: Optimizer, *, at_a_time: int = AT_A_TIME, to_host: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self.inner = inner
        self._to_host = to_host or _to_host
        self._parts = list(_parts(self._parameters, at_a_time))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups."""
        return self.inner.param_groups

    @property
    def state(self) -> Mapping[Any, dict[str, Any]]:
        """The state of each parameter; all but single numbers are in host memory."""
        return self.inner.state

    def step(self) -> None:
        """Take a step along the gradients."""
        gradients = {parameter: parameter.grad for parameter in self._parameters}
        self.zero_grad()
        try:
            for part in self._parts:
                for parameter in part:
                    parameter.grad = gradients[parameter]
                    self._move(parameter, lambda tensor, device=parameter.device: tensor.to(device, non_blocking=True))
                self.inner.step()
                for parameter in part:
                    parameter.grad = None
                for parameter in self.state:  # some libraries move the state of all parameters in their first step
                    self._move(parameter, self._to_host)
            if any(parameter.device.type == "cuda" for parameter in gradients):
                torch.cuda.synchronize()  # so that the copies are complete before they are read
        finally:
            for parameter, gradient in gradients.items():
                parameter.grad = gradient

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        self.inner.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore a `state_dict`, without moving it to the device."""
        states: Mapping[int, Mapping[str, Any]] = state_dict["state"]
        small = {
            number: {key: value for key, value in state.items() if not _rests(key, value)}
            for number, state in states.items()
        }
        self.inner.load_state_dict({**state_dict, "state": small})
        parameters = self._parameters
        kept = self.inner.state
        for number, state in states.items():
            for key, value in state.items():
                if _rests(key, value):
                    kept[parameters[number]][key] = self._to_host(value)

    @property
    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.inner.param_groups for parameter in group["params"]]

    def _move(self, parameter: nn.Parameter, move: Callable[[Tensor], Tensor]) -> None:
        state = self.state.get(parameter, {})
        for key, value in state.items():
            if _rests(key, value):
                state[key] = move(value)


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """The optimizer inside a `HostState`; other optimizers are returned unchanged."""
    return optimizer.inner if isinstance(optimizer, HostState) else optimizer


def _parts(parameters: list[nn.Parameter], at_a_time: int) -> Iterator[list[nn.Parameter]]:
    part: list[nn.Parameter] = []
    for parameter in parameters:
        if part and sum(each.nbytes for each in part) + parameter.nbytes > at_a_time:
            yield part
            part = []
        part.append(parameter)
    yield part


def _rests(key: str, value: Any) -> bool:
    """True if an entry of the state is kept in host memory because it grows with its parameter."""
    return isinstance(value, Tensor) and value.numel() > 1 and key not in CODES


def _to_host(tensor: Tensor) -> Tensor:
    """Copy a tensor to host memory, pinned if there is a GPU; return a tensor that is already there."""
    locked = torch.cuda.is_available()
    if tensor.device.type == "cpu" and tensor.is_pinned() == locked:
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=locked).copy_(tensor, non_blocking=True)
