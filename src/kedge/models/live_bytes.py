"""Counts the bytes of all tensors that are alive, operation by operation, and the work of the operations."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

__all__ = ["LiveBytes", "Work", "watch_gradients"]

DEVICE = torch.ops.prim.device.default
"""Asks a tensor without contents for its device, once or twice per operation; computes nothing."""

FUNCTIONS = {
    getattr(torch.ops.aten, name)
    for name in (
        "_log_softmax", "_log_softmax_backward_data", "_softmax", "_softmax_backward_data", "cumsum", "erf", "exp",
        "expm1", "gelu", "gelu_backward", "log", "log1p", "logsumexp", "pow", "rsqrt", "sigmoid", "sigmoid_backward",
        "silu", "silu_backward", "softplus", "softplus_backward", "sort", "tanh", "tanh_backward", "topk",
    )
}  # fmt: skip
"""Operations that take many instructions per number: on a CPU, which has few units, they cost more than what they read
and write."""


def _grouped_product(rows: Tensor, table: Tensor, *_: Any, **__: Any) -> int:
    """FLOPs of a product of experts: each row with one expert's matrix, or the reverse for a matrix's gradient."""
    return 2 * rows.numel() * table.shape[-1]


GROUPED_PRODUCT = getattr(torch.ops.aten, "_grouped_mm", None)
"""The product of experts; None in a torch that is too old for it."""
FORMULAS: dict[Any, Any] = {**flop_registry, GROUPED_PRODUCT: _grouped_product}


@dataclass(frozen=True)
class Work:
    """The work of some operations.

    Attributes:
        flops: Of matrix products and attention.
        bytes: Read and written by all other operations, and by products whose factors are larger than their result.
        functions: Read and written, in bytes, by operations that compute a function such as exp of every number.
        calls: Operations that compute something; views are free.
    """

    flops: float = 0.0
    bytes: float = 0.0
    functions: float = 0.0
    calls: float = 0.0


class LiveBytes(TorchDispatchMode):
    """Counts live storages inside its block; tensors without contents count like real ones.

    A storage is counted from the first operation that reads or returns one of its tensors until it is freed.

    Attributes:
        live: Bytes now.
        peak: Most bytes since the last `restart`.
        gradients: Bytes of the gradients at that moment; see `watch_gradients`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.gradients, self._gradients_now = 0, 0
        self._flops = self._bytes = self._functions = self._calls = 0.0
        self._known: dict[int, weakref.ref[Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Not: the guard against torch.compile costs as much as the counting of an operation."""
        return False

    def hold(self, tensors: Iterable[Tensor]) -> int:
        """Count tensors that exist already; return the bytes that this added."""
        before = self.live
        for tensor in tensors:
            self._see(tensor)
        return self.live - before

    def restart(self) -> int:
        """Return the peak, and look for a new one from here on."""
        peak, self.peak, self.gradients = self.peak, self.live, self._gradients_now
        return peak

    def add_gradient(self, size: int) -> None:
        """Note that a weight's gradient is complete."""
        self._gradients_now += size

    @property
    def work(self) -> Work:
        """What was computed so far."""
        return Work(self._flops, self._bytes, self._functions, self._calls)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation, and count its inputs and outputs."""
        kwargs = kwargs or {}
        if func is DEVICE:
            return func(*args)
        result = func(*args, **kwargs)
        size = 0
        for each in tree_iter((args, kwargs, result)):
            if isinstance(each, Tensor):
                self._see(each)
                size += each.nbytes
        if not func.is_view:
            self._calls += 1
            formula = FORMULAS.get(func._overloadpacket)
            if func._overloadpacket in FUNCTIONS:
                self._functions += size
            elif formula is None:
                self._bytes += size
            else:
                self._flops += formula(*args, **kwargs, out_val=result)
                self._bytes += _streamed(args)
        return result

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes()

        def freed(_: object) -> None:
            del self._known[key]
            self.live -= size

        self._known[key] = weakref.ref(storage, freed)
        self.live += size
        if self.live > self.peak:
            self.peak, self.gradients = self.live, self._gradients_now


def _streamed(args: tuple[Any, ...]) -> int:
    """Bytes of a product's largest factor: the weights, which few rows read in full."""
    return max((each.nbytes for each in args if isinstance(each, Tensor)), default=0)


def watch_gradients(model: nn.Module, counter: LiveBytes) -> list[Any]:
    """Let a counter know of each gradient of a weight that had none; returns the handles of the hooks."""

    def note(weight: Tensor) -> None:
        assert weight.grad is not None
        counter.add_gradient(weight.grad.nbytes)

    # A weight with several uses, such as a tied one, gets its gradient once all of them have been added.
    return [
        weight.register_post_accumulate_grad_hook(note)
        for weight in model.parameters()
        if weight.requires_grad and weight.grad is None
    ]
