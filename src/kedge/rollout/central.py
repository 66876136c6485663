"""Samples for all ranks on the first one, with an engine that runs in separate processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from kedge.algorithm.experience import Rollout
from kedge.ranks import Ranks
from kedge.rollout.engine import Engine, GenerateOptions


@dataclass(frozen=True)
class CentralEngine:
    """An engine on the first rank; all ranks get its rollouts.

    Args:
        engine: The engine; None on the other ranks.
        ranks: The ranks.
        is_exact: Whether the engine's log probabilities and values equal the trainer's; see `Engine`.
        device: The device of the rollouts.
    """

    engine: Engine | None
    ranks: Ranks
    is_exact: bool
    device: torch.device

    def with_sampling(self, **limits: Any) -> CentralEngine:
        """See `Engine`."""
        if self.engine is None:
            return self
        return replace(self, engine=self.engine.with_sampling(**limits))

    def generate(self, prompts: Sequence[Sequence[int]], **options: Unpack[GenerateOptions]) -> Rollout:
        """See `Engine`."""
        sampled: dict[str, Tensor] = {}

        def generate() -> dict[str, tuple[str, list[int]]]:
            assert self.engine is not None, "the first rank has the engine"
            sampled.update(self.engine.generate(prompts, **options).tensors())
            return {name: (str(table.dtype).removeprefix("torch."), [*table.shape]) for name, table in sampled.items()}

        own = torch.full((len(options["seeds"]),), self.ranks.is_first, dtype=torch.bool, device=self.device)
        for name, (dtype, shape) in self.ranks.first(generate).items():
            if name not in sampled:
                sampled[name] = torch.zeros(shape, dtype=getattr(torch, dtype), device=self.device)
            self.ranks.fill_in(own, sampled[name])
        return Rollout(**sampled)

    def publish(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> dict[str, float]:
        """See `Engine`. If the weights are sharded, all ranks gather each tensor when the engine reads it."""
        if not self.ranks.is_sharded:
            return self.ranks.first(lambda: {} if self.engine is None else self.engine.publish(tensors, version))

        def together() -> Iterator[tuple[str, Tensor]]:
            self.ranks.first(lambda: None)  # the others wait here until the engine reads
            yield from tensors

        reading = together()

        def publish() -> dict[str, float]:
            assert self.engine is not None, "the first rank has the engine"
            try:
                return self.engine.publish(reading, version)
            finally:  # also after an error
                for _ in reading:
                    pass

        if self.engine is None:
            for _ in reading:
                pass
        return self.ranks.first(publish)

    def close(self) -> None:
        """See `Engine`."""
        if self.engine is not None:
            self.engine.close()
