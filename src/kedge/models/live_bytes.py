"""Counts the bytes of all live tensors and the work of all operations, including tensors without contents."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
GROUPED_PRODUCT = getattr(aten, "_grouped_mm", None)
"""The grouped product of experts; None if torch is too old for it."""


class Hollow(Tensor):
    """A tensor with a shape and a number format, and no contents.

    Operations on it only compute shapes, using its counterpart on the meta device, so they take no memory and little
    time. Otherwise it looks like a CPU tensor, so autocast and attention choose the code that they run on a CPU. If
    code asks for contents, every condition is true, every number is 1, and every position is selected.

    Args:
        inner: A tensor on the meta device; views of a tensor share its storage.
    """

    shaped: Tensor
    same: ClassVar[bool] = True
    """The result of `torch.equal`; see `comparing`."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Hollow:
        """See the class."""
        shape = inner.shape
        strides = inner.stride()
        made: Any = Tensor._make_wrapper_subclass(cls, shape, strides, inner.storage_offset(), dtype=inner.dtype)
        made.shaped = inner
        return made

    @classmethod
    def like(cls, tensor: Tensor) -> Hollow:
        """Make one with the shape and the number format of another tensor."""
        return cls(torch.empty_like(tensor, device="meta"))

    @classmethod
    @contextmanager
    def comparing(cls, same: bool) -> Any:
        """Set whether `torch.equal` calls tensors without contents equal, within the block."""
        before = cls.same
        cls.same = same
        try:
            yield
        finally:
            cls.same = before

    def counterpart(self) -> Tensor:
        """The tensor on the meta device, in the current number format, which an assignment to `data` may change."""
        if self.shaped.dtype != self.dtype:
            self.shaped = torch.empty_like(self.shaped, dtype=self.dtype)
        return self.shaped

    def __repr__(self, **_: object) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"Hollow({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Compute the shapes of an operation's results."""
        if func in _CONTENTS:
            return _CONTENTS[func](args[0])
        if func in _INDEXING:
            args = (args[0], [place for each in args[1] for place in _places(each)], *args[2:])
        inputs = _inner(args)
        settings = {name: _inner(each) for name, each in (kwargs or {}).items()}
        if "device" in settings:
            settings["device"] = torch.device("meta")
        if func._overloadpacket is GROUPED_PRODUCT and inputs[0].dtype != torch.bfloat16:
            # Its shape rule only accepts bf16, though the kernels also accept fp32.
            product = func(inputs[0].bfloat16(), inputs[1].bfloat16(), *inputs[2:], **settings)
            return cls(product.to(inputs[0].dtype))
        key = (func, _key(inputs), *((name, _key(each)) for name, each in settings.items()))
        if key in _RESULTS:
            return _outer(_made(_RESULTS[key]))
        result = func(*inputs, **settings)
        if torch.Tag.inplace_view in func.tags:
            return return_and_correct_aliasing(func, args, dict(kwargs or {}), _outer(result))
        if func._schema.is_mutable and isinstance(result, Tensor):
            return settings["out"] if "out" in settings else args[0]
        if not (func.is_view or func._schema.is_mutable):
            _remember(key, result, inputs)
        return _outer(result)

    def tolist(self) -> Any:
        """Ones."""
        return torch.ones(self.shape, dtype=self.dtype).tolist()


def _inner(value: Any) -> Any:
    if isinstance(value, Hollow):
        return value.counterpart()
    if isinstance(value, Tensor):
        return value if value.is_meta else value.to("meta")
    return type(value)(map(_inner, value)) if type(value) in (list, tuple) else value


def _outer(value: Any) -> Any:
    if isinstance(value, Tensor):
        return Hollow(value)
    return type(value)(map(_outer, value)) if type(value) in (list, tuple) else value


_RESULTS: dict[Any, Any] = {}
"""Cached results of operations by the shapes of their inputs: shape rules are slow, and passes repeat themselves."""


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    return tuple(map(_key, value)) if type(value) in (list, tuple) else (type(value), value)


def _remember(key: Any, result: Any, inputs: Any) -> None:
    """Keep the shapes of results that share no storage with an input."""
    made = result if isinstance(result, tuple) else (result,)
    if all(isinstance(each, Tensor) for each in made):
        shared = {each.untyped_storage()._cdata for each in _tensors(inputs)}
        if not any(each.untyped_storage()._cdata in shared for each in made):
            shapes = tuple((each.shape, each.stride(), each.dtype) for each in made)
            _RESULTS[key] = shapes if isinstance(result, tuple) else shapes[0]


def _made(shapes: Any) -> Any:
    if isinstance(shapes[0], torch.Size):
        return torch.empty_strided(shapes[0], shapes[1], dtype=shapes[2], device="meta")
    return tuple(map(_made, shapes))


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors among some arguments."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _item(tensor: Tensor) -> bool | float | int:
    return True if tensor.dtype == torch.bool else 1.0 if tensor.is_floating_point() else 1


def _places(index: Tensor | None) -> tuple[Tensor | None, ...]:
    """Convert a mask to indices; one without contents selects every position."""
    if index is None or index.dtype != torch.bool:
        return (index,)
    if not isinstance(index, Hollow):
        return index.nonzero(as_tuple=True)
    return tuple(Hollow(torch.empty(index.numel(), dtype=torch.long, device="meta")) for _ in index.shape)


_CONTENTS: dict[Any, Any] = {
    aten._local_scalar_dense.default: _item,
    aten.equal.default: lambda _: Hollow.same,
    aten.nonzero.default: lambda mask: Hollow(torch.empty(mask.numel(), mask.ndim, dtype=torch.long, device="meta")),
}
_INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}

FUNCTIONS = {
    getattr(aten, name)
    for name in (
        "_log_softmax", "_log_softmax_backward_data", "_softmax", "_softmax_backward_data", "cumsum", "erf", "exp",
        "expm1", "gelu", "gelu_backward", "log", "log1p", "logsumexp", "pow", "rsqrt", "sigmoid", "sigmoid_backward",
        "silu", "silu_backward", "softplus", "softplus_backward", "sort", "tanh", "tanh_backward", "topk",
    )
}  # fmt: skip
"""Operations that take many instructions per number: on a CPU, computing them takes longer than reading and writing."""


FORMULAS: dict[Any, Any] = {
    **flop_registry,
    # FLOPs of a product of experts: each row with one expert's matrix, or the reverse for a matrix's gradient.
    GROUPED_PRODUCT: lambda rows, table, *_, **__: 2 * rows.numel() * table.shape[-1],
}


Label = tuple[str, str]
"""A tensor's purpose, and the role that holds it."""


class LiveBytes(TorchDispatchMode):
    """Counts live storages inside its block; tensors without contents count like real ones.

    A storage is counted from the first operation that reads or returns one of its tensors until it is freed.

    Attributes:
        live: Bytes now.
        peak: Most bytes since the last `restart`.
        at_peak: Bytes at that moment by label.
        label: Label for tensors that are first seen from now on.
        work: Work so far: `flops` of matrix products and attention; `bytes` of the largest factor of each product, and
            those that other operations read and write; the latter as `functions` for operations such as exp; and
            `calls` of operations that compute something, unlike views.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.label: Label = ("rollout buffers", "run")
        self.at_peak: dict[Label, int] = {}
        self.work = dict.fromkeys(("flops", "bytes", "functions", "calls"), 0.0)
        self._labels: Counter[Label] = Counter()
        self._known: dict[int, tuple[weakref.ref[Any], Label, int]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False, since the guard against torch.compile costs as much as counting an operation."""
        return False

    def hold(self, tensors: Iterable[Tensor], label: Label | None = None, *, share: float = 1.0) -> int:
        """Count tensors that exist already, or give them a different label.

        Args:
            tensors: The tensors.
            label: Their label; None for the current one.
            share: Share of their size that counts; 0 for tensors that another role already holds.

        Returns:
            The bytes that this added.
        """
        before = self.live
        for tensor in tensors:
            self._see(tensor, label or self.label, share)
        return self.live - before

    def label_of(self, tensor: Tensor) -> Label:
        """The label of a tensor that is counted."""
        return self._known[_storage(tensor)._cdata][1]

    def rename(self, old: Label, new: Label) -> None:
        """Change a label of live tensors to a different one."""
        self._known = {
            key: (tensor, new if label == old else label, size) for key, (tensor, label, size) in self._known.items()
        }
        self._labels[new] += self._labels.pop(old, 0)

    def restart(self) -> int:
        """Return the peak, and start measuring a new one."""
        peak = self.peak
        self.peak = self.live
        self.at_peak = dict(self._labels)
        return peak

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation, and count its inputs and outputs."""
        kwargs = kwargs or {}
        # Called directly, since another pass through the dispatcher takes as long as computing the result's shapes.
        result = Hollow.__torch_dispatch__(func, types, args, kwargs) if Hollow in types else func(*args, **kwargs)
        size = 0
        for each in _tensors((args, *kwargs.values(), result)):
            self._see(each)
            size += each.nbytes
        if not func.is_view:
            self.work["calls"] += 1
            packet = func._overloadpacket
            if (formula := FORMULAS.get(packet)) is None:
                self.work["functions" if packet in FUNCTIONS else "bytes"] += size
            else:
                self.work["flops"] += formula(*args, **kwargs, out_val=result)
                # Count the largest factor, usually the weights, which even a few rows read in full.
                self.work["bytes"] += max((each.nbytes for each in args if isinstance(each, Tensor)), default=0)
        return result

    def _see(self, tensor: Tensor, label: Label | None = None, share: float = 1.0) -> None:
        storage = _storage(tensor)
        key = storage._cdata
        if key in self._known:
            if label is not None:
                self._count(key, self._known[key][0], label, int(share * storage.nbytes()))
            return

        def freed(_: object) -> None:
            _, label, size = self._known.pop(key)
            self.live -= size
            self._labels[label] -= size

        self._count(key, weakref.ref(storage, freed), label or self.label, int(share * storage.nbytes()))

    def _count(self, key: int, storage: weakref.ref[Any], label: Label, size: int) -> None:
        if key in self._known:
            _, old, before = self._known[key]
            self.live -= before
            self._labels[old] -= before
        self._known[key] = (storage, label, size)
        self.live += size
        self._labels[label] += size
        if self.live > self.peak:
            self.peak = self.live
            self.at_peak = dict(self._labels)


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return (tensor.counterpart() if isinstance(tensor, Hollow) else tensor).untyped_storage()
