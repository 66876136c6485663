"""Weights in parts, read by the first rank's engine: all ranks gather the same, whatever the engine does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from kedge.ranks import Ranks
from kedge.rollout.central import CentralEngine
from kedge.rollout.engine import Engine
from kedge_base.errors import EngineError

NAMES = ["embed", "layer", "head"]
PATIENCE = 60.0


class Told:
    """Two ranks as two threads; what the first one does is told to the other."""

    is_sharded = True

    def __init__(self, number: int, messages: SimpleQueue[Any]) -> None:
        self.is_first, self._messages = number == 0, messages

    def first(self, do: Callable[[], Any]) -> Any:
        if self.is_first:
            try:
                message = do()
            except EngineError as error:
                self._messages.put(error)
                raise
            self._messages.put(message)
            return message
        message = self._messages.get(timeout=PATIENCE)
        if isinstance(message, EngineError):
            raise message
        return message


class Gathered:
    """Tensors that both ranks gather together: neither gets one before the other asks for the same one."""

    def __init__(self, meeting: threading.Barrier) -> None:
        self._meeting, self.gathered = meeting, list[str]()

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name in NAMES:
            self._meeting.wait(PATIENCE)
            self.gathered.append(name)
            yield name, torch.zeros(1)


class Reading:
    """An engine whose publishing is a function of the tensors."""

    def __init__(self, read: Callable[[Iterable[tuple[str, Tensor]]], dict[str, float]]) -> None:
        self.publish = lambda tensors, version: read(tensors)


def outcomes(read: Callable[[Iterable[tuple[str, Tensor]]], dict[str, float]]) -> list[tuple[object, list[str]]]:
    """What both ranks get from publishing, and what they gathered."""
    messages: SimpleQueue[Any] = SimpleQueue()
    meeting = threading.Barrier(2)

    def publish(number: int) -> tuple[object, list[str]]:
        tensors, ranks = Gathered(meeting), cast(Ranks, Told(number, messages))
        engine = None if number else cast(Engine, Reading(read))
        central = CentralEngine(engine, ranks, is_exact=False, device=torch.device("cpu"))
        try:
            found: object = central.publish(tensors, 1)
        except EngineError as error:
            found = str(error)
        return found, tensors.gathered

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(publish, range(2)))


def in_full(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, float]:
    return {"read": float(len(list(tensors)))}


def nothing(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, float]:
    raise EngineError("no server")


def partly(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, float]:
    for _ in tensors:
        raise EngineError("the disk is full")
    return {}


@pytest.mark.parametrize(
    ("read", "found"),
    [(in_full, {"read": 3.0}), (nothing, "no server"), (partly, "the disk is full")],
)
def test_ranks_gather_all_tensors_once_whatever_the_engine_reads(read: Any, found: object) -> None:
    assert outcomes(read) == [(found, NAMES)] * 2
