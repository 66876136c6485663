"""What the processes of a run do together: share rows out, add gradients up, exchange results."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from kedge import errors
from kedge.errors import KedgeError, LostContactError
from kedge.system.ranks.plan import Part, plan_parts

__all__ = ["ALONE", "Ranks"]

T = TypeVar("T")

BUCKET = 2**25
"""Gradients are added up in buckets of at most this many numbers, if no single parameter is larger."""

_group: ContextVar[dist.ProcessGroup | None] = ContextVar("group", default=None)
"""The group that this thread's operations go over; None for that of the training."""

SHORTEST_PAUSE, LONGEST_PAUSE = 2e-5, 2e-3
"""Seconds between two looks at an operation under way."""


@dataclass(frozen=True)
class Ranks:
    """The processes of a run; by default a single one, for which every method is trivial.

    All ranks call the same methods in the same order.

    Attributes:
        number: This process, from 0.
        count: How many there are.
        is_sharded: Each rank holds a part of every weight, and all ranks communicate in every pass.
    """

    number: int = 0
    count: int = 1
    is_sharded: bool = False

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and prints."""
        return self.number == 0

    @property
    def are_several(self) -> bool:
        """Whether there is more than one process."""
        return self.count > 1

    def plan(self, lengths: Sequence[int], budget: int | None) -> list[Part]:
        """The passes of this rank over a batch; see `plan_parts`.

        Args:
            lengths: Tokens per row.
            budget: Tokens per pass; None for no limit.
        """
        return plan_parts(lengths, budget, number=self.number, count=self.count, same_number=self.is_sharded)

    def fill_in(self, own: Bool[Tensor, " rows"], *tables: Tensor) -> None:
        """Complete tables in place with the rows that other ranks know.

        Args:
            own: The rows that this rank knows. Rows that no rank knows stay as they are.
            tables: Tensors whose first axis is the rows, of the same shape on every rank.
        """
        if not self.are_several:
            return
        known = own.to(torch.int32)
        self._reduce(known, dist.ReduceOp.SUM)
        for table in tables:
            mask = own.reshape(-1, *[1] * (table.ndim - 1))
            total = torch.where(mask, table, torch.zeros_like(table))
            total = total.to(torch.uint8) if table.dtype == torch.bool else total
            self._reduce(total, dist.ReduceOp.SUM)
            table.copy_(torch.where((known > 0).reshape(mask.shape), total.to(table.dtype), table))

    def everyones(self, figures: Float[Tensor, " figures"]) -> Float[Tensor, "ranks figures"]:
        """The figures of all ranks, in the order of the ranks."""
        if not self.are_several:
            return figures[None]
        found = [torch.empty_like(figures) for _ in range(self.count)]
        self._finish(dist.all_gather(found, figures.contiguous(), group=_group.get(), async_op=True), figures)
        return torch.stack(found)

    def messages(self, message: Any) -> list[Any]:
        """The messages of all ranks, in the order of the ranks; JSON types."""
        if not self.are_several:
            return [message]
        text = json.dumps(message).encode()
        own = torch.frombuffer(bytearray(text.ljust(self.largest(len(text)))), dtype=torch.uint8)
        return [json.loads(bytes(each.tolist())) for each in self.everyones(own)]

    def sums(self, figures: Sequence[float]) -> list[float]:
        """The sum of each figure over the ranks, in the order of the ranks, in float64."""
        if not self.are_several:
            return list(figures)
        return self.everyones(torch.tensor(figures, dtype=torch.float64)).sum(0).tolist()

    def summed(self, tensor: Tensor) -> Tensor:
        """The sum of a tensor over the ranks, the same bits on every rank."""
        if not self.are_several:
            return tensor
        total = tensor.clone()
        self._reduce(total, dist.ReduceOp.SUM)
        return total

    def largest(self, number: int) -> int:
        """The largest of a number over the ranks."""
        if not self.are_several:
            return number
        return int(self.everyones(torch.tensor([number], dtype=torch.int64)).max())

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace every gradient by its sum over the ranks; those of sharded weights are sums already.

        Every rank has gradients of the same parameters, because each evaluates at least one row.
        """
        if not self.are_several:
            return
        gradients = [each.grad for each in parameters if each.grad is not None]
        for bucket in _buckets([each for each in gradients if not isinstance(each, DTensor)]):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            self._reduce(flat, dist.ReduceOp.SUM)
            for gradient, total in zip(bucket, flat.split([each.numel() for each in bucket]), strict=True):
                gradient.copy_(total.reshape(gradient.shape))

    def first(self, do: Callable[[], T]) -> T:
        """Let the first rank do something, and tell all others its result, or its error.

        Args:
            do: Returns JSON types. It runs on the first rank alone.

        Raises:
            KedgeError: It raised one.
        """
        if not self.are_several:
            return do()
        if not self.is_first:
            return _unpacked(self._told(None))
        try:
            result = do()
        except KedgeError as error:
            self._told({"error": type(error).__name__, "message": str(error), "details": vars(error)})
            raise
        self._told({"result": result})
        return result

    def wait(self) -> None:
        """Wait until all ranks are here."""
        self.largest(0)

    def apart(self) -> Callable[[], AbstractContextManager[None]]:
        """A context for another thread, in which operations do not mix with those of this one; all ranks ask for it.

        On every rank that thread calls the same methods in the same order, whatever this one does meanwhile.
        """
        if not self.are_several:
            return nullcontext
        return partial(_within, cast(dist.ProcessGroup, dist.new_group(backend="gloo")))

    def _told(self, message: dict[str, Any] | None) -> dict[str, Any]:
        """A message of the first rank, on every rank."""
        text = json.dumps(message, default=str).encode()
        size = torch.tensor([len(text)])
        self._finish(dist.broadcast(size, 0, group=_group.get(), async_op=True), size)
        content = torch.zeros(int(size), dtype=torch.uint8)
        if message is not None:
            content.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        self._finish(dist.broadcast(content, 0, group=_group.get(), async_op=True), content)
        return json.loads(bytes(content.tolist()))

    def _reduce(self, tensor: Tensor, operation: Any) -> None:
        self._finish(dist.all_reduce(tensor, operation, group=_group.get(), async_op=True), tensor)

    @staticmethod
    def _finish(work: Any, tensor: Tensor) -> None:
        """Wait for an operation, so that signals are handled meanwhile: torch's own wait lets none through.

        Raises:
            LostContactError: Another rank is gone.
        """
        pause = SHORTEST_PAUSE
        try:
            while tensor.device.type == "cpu" and not work.is_completed():
                time.sleep(pause)
                pause = min(pause * 1.5, LONGEST_PAUSE)
            work.wait()
        except RuntimeError as error:
            raise LostContactError from error


ALONE = Ranks()
"""The single process."""


@contextmanager
def _within(group: dist.ProcessGroup) -> Iterator[None]:
    before = _group.set(group)
    try:
        yield
    finally:
        _group.reset(before)


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The gradients in order, in lists of one number format and of limited size."""
    bucket: list[Tensor] = []
    for gradient in gradients:
        is_full = sum(each.numel() for each in bucket) + gradient.numel() > BUCKET
        if bucket and (is_full or bucket[0].dtype != gradient.dtype):
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket


def _unpacked(message: dict[str, Any]) -> Any:
    """The result in a message of the first rank; its error is raised as one of the same class."""
    if "result" in message:
        return message["result"]
    kind = getattr(errors, message["error"], KedgeError)
    error = kind.__new__(kind)
    error.args = (message["message"],)
    vars(error).update(message["details"])
    raise error
