"""Sampling for all ranks by the first one, whose engine has processes of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from kedge.algorithm.experience import Rollout
from kedge.errors import KedgeError
from kedge.rollout.engine import Engine
from kedge.system.ranks import Ranks

__all__ = ["CentralEngine"]

T = TypeVar("T")
Tensors = Iterable[tuple[str, Tensor]]
READ = "read"
"""What the first rank tells the others before it reads weights that are in parts."""


class _Readings:
    """Weights in parts, which the first rank's engine reads as whole tensors: all ranks gather them in lockstep.

    The engine may read them any number of times, also later, for a server that was started again, and may give up in
    the middle. The others learn of each reading, and gather all tensors; the first one gathers the rest for them.

    Args:
        ranks: The ranks.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._open: Iterator[tuple[str, Tensor]] = iter(())
        self.tensors: Tensors = ()

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """On the first rank: the tensors, whole."""
        self._finish()
        self._ranks.first(lambda: {READ: True})
        self._open = iter(self.tensors)
        for each in self._open:  # noqa: UP028 (`yield from` would end it with this generator)
            yield each

    def lead(self, do: Callable[[], T]) -> T:
        """On the first rank: do something that may read the tensors; all ranks get its result or its error."""
        try:
            result = do()
        except KedgeError as error:
            self._finish()
            raised = error  # the name of the clause ends with it

            def fail() -> Any:
                raise raised

            return self._ranks.first(fail)
        self._finish()
        return self._ranks.first(lambda: {READ: False, "result": result})["result"]

    def follow(self) -> Any:
        """On the others: gather the tensors as often as the first rank reads them; its result or its error."""
        while (told := self._ranks.first(dict[str, Any]))[READ]:
            for _ in self.tensors:
                pass
        return told["result"]

    def _finish(self) -> None:
        for _ in self._open:
            pass


@dataclass(frozen=True)
class CentralEngine:
    """An engine on the first rank, which all ranks get the rollouts of.

    Args:
        engine: The engine; None on the other ranks.
        ranks: The ranks.
        is_exact: See `Engine`.
        device: Where the rollouts are.
    """

    engine: Engine | None
    ranks: Ranks
    is_exact: bool
    device: torch.device
    _readings: list[_Readings] = field(default_factory=list)

    def with_sampling(self, *, max_new_tokens: int, temperature: float, greedy: bool = False) -> CentralEngine:
        """See `Engine`."""
        if self.engine is None:
            return self
        engine = self.engine.with_sampling(max_new_tokens=max_new_tokens, temperature=temperature, greedy=greedy)
        return replace(self, engine=engine)

    def generate(self, prompts: Sequence[Sequence[int]], **given: Any) -> Rollout:
        """See `Engine`."""
        sampled: dict[str, Tensor] = {}

        def generate() -> dict[str, tuple[str, list[int]]]:
            assert self.engine is not None, "the first rank has the engine"
            rollout = self.engine.generate(prompts, **given)
            sampled.update(
                {each.name: value for each in fields(rollout) if (value := getattr(rollout, each.name)) is not None}
            )
            return {
                name: (str(value.dtype).removeprefix("torch."), list(value.shape)) for name, value in sampled.items()
            }

        own = torch.full((len(prompts),), self.ranks.is_first, dtype=torch.bool, device=self.device)
        for name, (dtype, shape) in self._on_first(generate).items():
            table = sampled.get(name)
            sampled[name] = (
                torch.zeros(shape, dtype=getattr(torch, dtype), device=self.device) if table is None else table
            )
            self.ranks.fill_in(own, sampled[name])
        return Rollout(**sampled)

    def publish(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> dict[str, float]:
        """See `Engine`. If the ranks hold parts of the weights, each tensor is gathered when the engine reads it."""
        engine, given = self.engine, tensors
        if self.ranks.is_sharded:
            self._readings[:] = self._readings or [_Readings(self.ranks)]
            self._readings[0].tensors, given = tensors, self._readings[0]
        return self._on_first(lambda: {} if engine is None else engine.publish(given, version))

    def _on_first(self, do: Callable[[], T]) -> T:
        """What the first rank does; the others help it to read weights that are in parts."""
        if not self._readings:
            return self.ranks.first(do)
        return self._readings[0].lead(do) if self.ranks.is_first else self._readings[0].follow()

    def close(self) -> None:
        """See `Engine`."""
        if self.engine is not None:
            self.engine.close()
