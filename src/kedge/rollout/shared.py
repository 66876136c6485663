"""Shares sampling between the ranks: each samples some of the rows, and all get the full rollout."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from kedge.algorithm.experience import Rollout
from kedge.data.tokens import pad_left
from kedge.ranks import Ranks
from kedge.ranks.sharding import whole_weights
from kedge.rollout.engine import Engine, GenerateOptions


@dataclass(frozen=True)
class SharedEngine:
    """Engines on all ranks that act as one.

    A row's tokens depend only on its prompt, its seed and the weights, and so not on the number of ranks. Neighboring
    rows stay together, so that responses to one prompt share its prefill.

    Args:
        engine: This rank's.
        ranks: The ranks.
        pad_id: Fills the unused slots.
        weights: Sharded modules that the engine samples from; their weights are gathered for it.
    """

    engine: Engine
    ranks: Ranks
    pad_id: int
    weights: tuple[nn.Module, ...]

    @property
    def is_exact(self) -> bool:
        """As for the engines."""
        return self.engine.is_exact

    def with_sampling(self, **limits: Any) -> SharedEngine:
        """See `Engine`."""
        return replace(self, engine=self.engine.with_sampling(**limits))

    def publish(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> dict[str, float]:
        """See `Engine`."""
        return self.engine.publish(tensors, version)

    def close(self) -> None:
        """See `Engine`."""
        self.engine.close()

    def generate(self, prompts: Sequence[Sequence[int]], **options: Unpack[GenerateOptions]) -> Rollout:
        """See `Engine`."""
        groups = options.get("groups")
        dialogue = options.get("dialogue")
        total = len(options["seeds"])
        count = self.ranks.count
        number = self.ranks.number
        rows = list(range(total * number // count, total * (number + 1) // count))
        sampled = rows or [0]  # a rank without rows samples one to learn the tensors' shapes
        with whole_weights(self.weights):
            options |= {
                "seeds": [options["seeds"][row] for row in sampled],
                "groups": [row if groups is None else groups[row] for row in sampled],
                "dialogue": None if dialogue is None else dialogue.among(sampled),
            }
            part = self.engine.generate([prompts[row] for row in sampled] if dialogue is None else (), **options)
        device = part.response_ids.device
        own = torch.zeros(total, dtype=torch.bool, device=device)
        own[rows] = True
        tables: dict[str, Tensor] = {}
        if dialogue is None:
            prompt_ids, prompt_mask = pad_left(prompts, self.pad_id)
            tables = {"prompt_ids": prompt_ids.to(device), "prompt_mask": prompt_mask.to(device)}
        else:
            part = self._equally_wide(part, own, rows)
        for name, known in part.tensors().items():
            if name not in tables:
                tables[name] = known.new_zeros(total, *known.shape[1:])
                tables[name][rows] = known[: len(rows)]
                self.ranks.fill_in(own, tables[name])
        return Rollout(**tables)

    def _equally_wide(self, part: Rollout, own: Tensor, rows: Sequence[int]) -> Rollout:
        """Pad the prompts of this rank's rows, and their privileged tokens, to the largest width of all ranks."""
        tables = part.tensors()
        for name in ("prompt", "privileged"):
            mask = tables.get(f"{name}_mask")
            if mask is None:
                continue
            lengths = torch.zeros(len(own), dtype=torch.long, device=own.device)
            lengths[rows] = mask.sum(-1)[: len(rows)]
            self.ranks.fill_in(own, lengths)
            width = int(lengths.max())
            tables[f"{name}_ids"] = _widened(tables[f"{name}_ids"], width, self.pad_id)
            tables[f"{name}_mask"] = _widened(mask, width, False)
        return Rollout(**tables)


def _widened(table: Tensor, width: int, fill: float) -> Tensor:
    """Change the width of a left-padded table; the new width suffices for the rows that count."""
    return nn.functional.pad(table, (width - table.shape[1], 0), value=fill)
