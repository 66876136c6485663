"""Samples in a separate thread, with the weights of an earlier update, while the policy is trained."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from torch import Tensor
from typing_extensions import Unpack

from kedge.algorithm.experience import Rollout
from kedge.models import LanguageModel
from kedge.models.adapters import shared_copy
from kedge.rollout.engine import Engine, GenerateOptions

T = TypeVar("T")
Tensors = list[tuple[str, Tensor]]


def frozen_copy(policy: LanguageModel) -> LanguageModel:
    """Copy the policy, so that training does not change it, without the value head: the trainer computes the values."""
    copy = shared_copy(policy, only_frozen=True).requires_grad_(False)
    copy.value_head = None
    return copy


@dataclass
class _Turns:
    """State shared by a background engine and its variants: the thread, its work, and the versions of the weights.

    Attributes:
        thread: A single thread, so work is done in the order in which it was started.
        works: Work that may be under way.
        current: The policy's current weights, read on demand.
        version: The version of `current`.
        published: The version that the engine has.
        copied: The version of `copy`.
        copy: The weights that the newest work samples with.
    """

    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "kedge-rollout"))
    works: list[Future[Any]] = field(default_factory=list)
    current: Iterable[tuple[str, Tensor]] = ()
    version: int | None = None
    published: int | None = None
    copied: int | None = None
    copy: Tensors = field(default_factory=Tensors)


@dataclass(frozen=True)
class BackgroundEngine:
    """An engine for a separate thread, which the trainer can use between two tasks.

    Work is done in order, one piece at a time, so weights change only where nothing is sampled. Work samples with the
    weights at the time of `start`, which copies them. The trainer's own calls (evaluations, fixed prompts) wait until
    no work is under way, and sample with its current weights. Only the trainer starts work, and only when it is done
    with the responses, so rewards and global random generators are never used by both.

    Memory: one copy of the weights per version that pending work needs, and the engine's copy.

    Attributes:
        engine: The engine that samples; nothing else may use it.
        apart: The context of the work: on several ranks, operations between them that do not mix with the trainer's.
    """

    engine: Engine
    apart: Callable[[], AbstractContextManager[None]] = nullcontext
    _turns: _Turns = field(default_factory=_Turns)

    @property
    def is_exact(self) -> bool:
        """False: the trainer's weights may be newer than the sampling weights."""
        return False

    def with_sampling(self, **limits: Any) -> BackgroundEngine:
        """See `Engine`."""
        return replace(self, engine=self.engine.with_sampling(**limits))

    def start(self, work: Callable[[Engine, dict[str, float]], T]) -> Future[T]:
        """Run work in the background after all earlier work, with the last published weights.

        Args:
            work: Called with the engine, and the metrics of publishing its weights.
        """
        turns = self._turns
        version = self._turns.version
        assert version is not None, "the weights are published before any work"
        if turns.copied != version:
            turns.copy = [(name, tensor.detach().clone()) for name, tensor in turns.current]
            turns.copied = version
        copy = turns.copy

        def do() -> T:
            with self.apart():
                return work(self.engine, self._publish(copy, version))

        future = turns.thread.submit(do)
        turns.works = [each for each in turns.works if not each.done()] + [future]
        return future

    def generate(self, prompts: Sequence[Sequence[int]], **options: Unpack[GenerateOptions]) -> Rollout:
        """Sample with the policy's current weights, after all work under way; see `Engine`."""
        wait(self._turns.works)
        # Published each time: the weights may have been restored from a checkpoint, or be from the middle of an update.
        self.engine.publish(self._turns.current, self._turns.version or 0)
        self._turns.published = None
        return self.engine.generate(prompts, **options)

    def publish(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> dict[str, float]:
        """Note the source of the weights; the first time, also send them, which starts the engine; see `Engine`."""
        is_first = self._turns.version is None
        self._turns.current = tensors
        self._turns.version = version
        return self._publish(tensors, version) if is_first else {}

    def close(self) -> None:
        """Wait for the work under way, drop what has not started, and end the engine; see `Engine`.

        With several ranks, nothing is dropped unless an error ends the run: another rank may have started on it.
        """
        drops = self.apart is nullcontext or sys.exc_info()[0] is not None
        self._turns.thread.shutdown(wait=True, cancel_futures=drops)
        self.engine.close()

    def _publish(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> dict[str, float]:
        if self._turns.published == version:
            return {}
        self._turns.published = None  # until it is complete
        metrics = self.engine.publish(tensors, version)
        self._turns.published = version
        return metrics
