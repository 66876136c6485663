"""Weights of frozen models that are in the host's memory between their passes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import RLock

import torch
from torch import nn

__all__ = ["HostWeights", "at_hand"]


class HostWeights:
    """Moves a frozen module's weights to the host's memory, and to its device for a while.

    Nothing is copied back: the weights do not change. Buffers, which are small, stay on the device.

    Args:
        module: The module.
        device: The device of its passes.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._weights, self._device = list(module.parameters()), device
        # Scoring can run in two threads at a time; one must not take the weights away from the other.
        self._turn = RLock()
        pinned = device.type == "cuda"  # copied without a detour through other memory
        for weight in self._weights:
            weight.data = weight.data.cpu().pin_memory() if pinned else weight.data.cpu()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Within this context the weights are on the device."""
        with self._turn:
            here = [weight.data for weight in self._weights]
            try:
                for weight in self._weights:
                    weight.data = weight.data.to(self._device, non_blocking=True)
                yield
            finally:
                for weight, data in zip(self._weights, here, strict=True):
                    weight.data = data


def at_hand(host: HostWeights | None) -> AbstractContextManager[None]:
    """A context for passes through a model whose weights may be in the host's memory; None if they are not."""
    return nullcontext() if host is None else host.on_device()
