"""Turns of the policy as single actions: sums and means over a turn."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kedge.algorithm.masking import check_same_shape, keep_counted


@dataclass(frozen=True)
class Turns:
    """The turns of some rows.

    Attributes:
        mask: True = counts.
        starts: True at the first token of each turn, and at a slot for a score after the last one, which is a step of
            its own.
        first: for each slot, the index of the first slot of its turn.
    """

    mask: Bool[Tensor, "*batch time"]
    starts: Bool[Tensor, "*batch time"]
    first: Int[Tensor, "*batch time"]

    @classmethod
    def of(
        cls,
        turn_starts: Bool[Tensor, "*batch time"] | None,
        actions: Bool[Tensor, "*batch time"],
        mask: Bool[Tensor, "*batch time"] | None = None,
    ) -> Turns:
        """Find the turns.

        Args:
            turn_starts: True at the first token of each turn; None if a row's actions are one turn.
            actions: the policy's tokens. The first one begins a turn in any case.
            mask: the slots that count; None for the actions.

        Raises:
            ShapeError: shapes differ.
        """
        mask = actions if mask is None else mask
        check_same_shape(turn_starts=turn_starts, actions=actions, mask=mask)
        starts = (actions & (actions.cumsum(-1) == 1)) | (mask & ~actions)
        if turn_starts is not None:
            starts = starts | (turn_starts & actions)
        slots = torch.arange(mask.shape[-1], device=mask.device)
        return cls(mask, starts, torch.where(starts, slots, 0).cummax(-1).values)

    def summed(self, x: Float[Tensor, "*batch time"]) -> Float[Tensor, "*batch time"]:
        """Sum the counted entries of each turn at its first slot, 0 elsewhere; rounded once, in any order of adding."""
        counted = keep_counted(x, self.mask).double()
        return torch.zeros_like(counted).scatter_add(-1, self.first, counted).to(x.dtype)

    def spread(self, x: Float[Tensor, "*batch time"]) -> Float[Tensor, "*batch time"]:
        """Copy the entry at the first slot of each turn to all of its counted slots."""
        return keep_counted(x.gather(-1, self.first), self.mask)

    def averaged(self, x: Float[Tensor, "*batch time"]) -> Float[Tensor, "*batch time"]:
        """Replace each counted entry by the mean of its turn."""
        counts = self.summed(torch.ones_like(x)).clamp(min=1)
        return self.spread(self.summed(x) / counts)
