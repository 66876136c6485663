"""The processes of a run: share the passes through a model, sum gradients, exchange results."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from kedge.ranks.passes import AdaptiveTokens, Part, PassTokens, Prompts, plan_parts, smaller_passes, tokens_of
from kedge_base import errors
from kedge_base.errors import DataError, KedgeError, LostContactError, NumericsError
from kedge_base.generators import random_state, restore_random_state
from kedge_base.machine.memory import is_out_of_memory, release

T = TypeVar("T")

BUCKET = 2**25
"""Gradients are summed in buckets of at most this many numbers, unless a single parameter is larger."""

_group: ContextVar[dist.ProcessGroup | None] = ContextVar("group", default=None)
"""The process group of this thread's operations; None for the training's group."""

PATIENCE = timedelta(hours=6)
"""Maximum wait for another rank, for example because of a slow reward function. A rank that ends is noticed
immediately.
"""

SHORTEST_PAUSE = 2e-5
LONGEST_PAUSE = 2e-3
"""Seconds between two checks of an operation under way."""


@dataclass(frozen=True)
class Ranks:
    """The processes of a run; by default a single one, for which every method is trivial.

    All ranks call the same methods in the same order.

    Attributes:
        number: This process, from 0.
        count: Number of processes.
        is_sharded: Each rank holds a shard of every weight, and all ranks communicate in every pass.
    """

    number: int = 0
    count: int = 1
    is_sharded: bool = False

    @property
    def is_first(self) -> bool:
        """True if this process writes files and prints."""
        return self.number == 0

    @property
    def are_several(self) -> bool:
        """True if there is more than one process."""
        return self.count > 1

    def plan(self, lengths: Sequence[int], budget: PassTokens, prompts: Prompts = None) -> list[Part]:
        """The passes of this rank over a batch; see `plan_parts`.

        Args:
            lengths: Tokens per row.
            budget: Tokens per pass; None for no limit.
            prompts: See `Prompts`.
        """
        return plan_parts(
            lengths,
            tokens_of(budget),
            prompts=prompts,
            number=self.number,
            count=self.count,
            same_number=self.is_sharded,
        )

    def fill_in(self, own: Bool[Tensor, " rows"], *tables: Tensor) -> None:
        """Complete tables in place with the rows that other ranks have computed.

        Args:
            own: The rows that this rank has computed. Rows that no rank has computed are unchanged.
            tables: Tensors with rows on the first axis, of the same shape on every rank.
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
        """Gather the figures of all ranks, in the order of the ranks."""
        if not self.are_several:
            return figures[None]
        found = [torch.empty_like(figures) for _ in range(self.count)]
        self._finish(dist.all_gather(found, figures.contiguous(), group=_group.get(), async_op=True), figures)
        return torch.stack(found)

    def messages(self, message: Any) -> list[Any]:
        """Gather the messages of all ranks, in the order of the ranks; JSON types."""
        if not self.are_several:
            return [message]
        return [json.loads(each.numpy().tobytes()) for each in self.everyones(self._encoded(json.dumps(message)))]

    def sums(self, figures: Sequence[float]) -> list[float]:
        """Sum each figure over the ranks, in the order of the ranks, in float64."""
        if not self.are_several:
            return list(figures)
        return self.everyones(torch.tensor(figures, dtype=torch.float64)).sum(0).tolist()

    def summed(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the ranks, with bit-identical results on every rank."""
        if not self.are_several:
            return tensor
        total = tensor.clone()
        self._reduce(total, dist.ReduceOp.SUM)
        return total

    def largest(self, number: int) -> int:
        """Return the maximum of a number over the ranks."""
        if not self.are_several:
            return number
        return int(self.everyones(torch.tensor([number])).max())

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace every gradient by its sum over the ranks; gradients of sharded weights are already sums.

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
        """Run a function on the first rank, and send its result or error to all others.

        Args:
            do: Returns JSON types; tensors and arrays in them are lists on the other ranks. It only runs on the first
                rank.

        Raises:
            KedgeError: The function raised one, or returned other types.
        """
        if not self.are_several:
            return do()
        if not self.is_first:
            return _unpacked(self._broadcast(""))
        try:
            result = do()
            message = json.dumps({"result": result}, default=_listed)
        except KedgeError as error:
            found = {"error": type(error).__name__, "message": str(error), "details": vars(error)}
            self._broadcast(json.dumps(found, default=str))
            raise
        self._broadcast(message)
        return result

    def wait(self) -> None:
        """Wait until all ranks are here."""
        self.largest(0)

    def apart(self) -> Callable[[], AbstractContextManager[None]]:
        """Return a context in which another thread's collectives do not mix with this one's; all ranks call this.

        On every rank, that thread calls the same methods in the same order, independently of this one.
        """
        if not self.are_several:
            return nullcontext
        return partial(_within, cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=PATIENCE)))

    def _broadcast(self, message: str) -> dict[str, Any]:
        """Send a message of the first rank to every rank."""
        content = self._encoded(message)
        self._finish(dist.broadcast(content, 0, group=_group.get(), async_op=True), content)
        return json.loads(content.numpy().tobytes())

    def _encoded(self, message: str) -> Tensor:
        """Encode a message as bytes, padded to the same length on every rank."""
        text = message.encode()
        return torch.frombuffer(bytearray(text.ljust(self.largest(len(text)))), dtype=torch.uint8)

    def _reduce(self, tensor: Tensor, operation: Any) -> None:
        self._finish(dist.all_reduce(tensor, operation, group=_group.get(), async_op=True), tensor)

    @staticmethod
    def _finish(work: Any, tensor: Tensor) -> None:
        """Wait for an operation while handling signals, which torch's own wait blocks.

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


def within_memory(
    budget: PassTokens,
    lengths: Sequence[int],
    attempt: Callable[[], T],
    *,
    prompts: Prompts = None,
    ranks: Ranks = ALONE,
) -> T:
    """Evaluate a batch in passes, repeating it with smaller passes as long as memory runs out.

    The number of tokens is the same on every rank: all ranks repeat the attempt if it failed on one. With sharded
    weights nothing can be repeated, because each pass communicates; a fixed number is kept.

    Args:
        budget: Tokens per pass, which each attempt reads again.
        lengths: Tokens of the rows in the batch. A pass holds at least one row, so numbers below the longest row do not
            help.
        attempt: Makes all passes of this rank, from the start and without communication. Its random numbers are the
            same each time.
        prompts: See `Prompts`.
        ranks: They share the batch.
    """
    if not isinstance(budget, AdaptiveTokens) or ranks.is_sharded:
        return attempt()
    while True:
        generators = random_state()
        failure = None
        results = list[T]()
        try:
            results.append(attempt())
        except Exception as error:
            if isinstance(error, KedgeError) or not is_out_of_memory(error):
                raise
            failure = error
        smaller = 0
        if ranks.largest(int(failure is not None)):
            smaller = ranks.largest(smaller_passes(budget.tokens, lengths, prompts, ranks.count))
        if not smaller:
            if failure is not None:
                raise failure
            return results[0]
        budget.halve(smaller, failure)
        release(failure)
        del failure, results
        restore_random_state(*generators)


def evaluate_in_passes(
    evaluate: Callable[[list[int]], Sequence[Tensor]],
    lengths: Sequence[int],
    budget: PassTokens,
    *,
    prompts: Prompts = None,
    ranks: Ranks,
) -> list[Tensor]:
    """Evaluate the rows of a batch in passes of similar length that fit into memory; results keep the order of the
    rows.

    Args:
        evaluate: Returns tables for the rows of a pass: always the same number, with these rows on the first axis.
        lengths: Tokens of the rows in the batch.
        budget: Tokens per pass; None for as few passes as possible.
        prompts: See `Prompts`.
        ranks: They share the passes; all of them get all results.

    Returns:
        The same tables for the whole batch; none if it has no rows.
    """
    own = torch.zeros(len(lengths), dtype=torch.bool)

    def passes() -> list[Tensor]:
        found: list[Tensor] = []
        for part in ranks.plan(lengths, budget, prompts):
            tables = evaluate(part.rows)
            found = found or [each.new_zeros(len(lengths), *each.shape[1:]) for each in tables]
            if part.counts:
                own[part.rows] = True
                for whole, table in zip(found, tables, strict=True):
                    whole[part.rows] = table
        return found

    results = within_memory(budget, lengths, passes, prompts=prompts, ranks=ranks)
    if results:
        ranks.fill_in(own.to(results[0].device), *results)
    return results


def check_equal_weights(ranks: Ranks, modules: Iterable[nn.Module]) -> None:
    """Compare a checksum of all weights between the ranks, unless there is a single rank or the weights are sharded.

    Raises:
        NumericsError: They differ; raised on every rank.
    """
    if not ranks.are_several or ranks.is_sharded:
        return
    found = ranks.everyones(torch.tensor([checksum(modules)])).reshape(-1).tolist()
    if len(set(found)) > 1:
        other = next(number for number, value in enumerate(found) if value != found[0])
        raise NumericsError(
            f"ranks 0 and {other} have different weights; check that all machines have the same versions and hardware"
        )


@torch.no_grad()
def checksum(modules: Iterable[nn.Module]) -> int:
    """A number that changes with any weight; the weights are not sharded."""
    weights = [weight for module in modules for weight in module.parameters()]
    # Weighted by position, so that swapped weights are detected.
    return sum((number + 1) * _bits(weight) for number, weight in enumerate(weights)) % 2**53


def _bits(weight: Tensor) -> int:
    """Sum a tensor's bits, read as integers."""
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.element_size()]
    return int(weight.contiguous().view(width).sum(dtype=torch.int64))


@contextmanager
def _within(group: dist.ProcessGroup) -> Iterator[None]:
    before = _group.set(group)
    try:
        yield
    finally:
        _group.reset(before)


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Split the gradients, in order, into lists with a single dtype and limited size."""
    bucket: list[Tensor] = []
    for gradient in gradients:
        is_full = sum(each.numel() for each in bucket) + gradient.numel() > BUCKET
        if bucket and (is_full or bucket[0].dtype != gradient.dtype):
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket


def _listed(value: Any) -> Any:
    """Convert a tensor, an array, or one of their numbers to JSON types."""
    if not hasattr(value, "tolist"):
        raise DataError(
            f"an object of type {type(value).__name__} cannot be sent to the other ranks; "
            "pass texts, numbers, lists, arrays or dicts"
        )
    return value.tolist()


def _unpacked(message: dict[str, Any]) -> Any:
    """Return the result in a message of the first rank, or raise an error of the same class as its error."""
    if "result" in message:
        return message["result"]
    kind = getattr(errors, message["error"], KedgeError)
    error = kind.__new__(kind)
    error.args = (message["message"],)
    vars(error).update(message["details"])
    raise error
