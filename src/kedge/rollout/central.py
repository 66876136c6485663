"""Sampling for all ranks by the first one, whose engine has processes of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from kedge.algorithm.experience import Rollout
from kedge.ranks import Ranks
from kedge.rollout.engine import Engine

__all__ = ["CentralEngine"]


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
        for name, (dtype, shape) in self.ranks.first(generate).items():
            table = sampled.get(name)
            sampled[name] = (
                torch.zeros(shape, dtype=getattr(torch, dtype), device=self.device) if table is None else table
            )
            self.ranks.fill_in(own, sampled[name])
        return Rollout(**sampled)

    def publish(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> dict[str, float]:
        """See `Engine`."""
        return self.ranks.first(lambda: {} if self.engine is None else self.engine.publish(tensors, version))

    def close(self) -> None:
        """See `Engine`."""
        if self.engine is not None:
            self.engine.close()
