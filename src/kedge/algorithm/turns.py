"""Turns of the policy as single actions: sums and means over a turn, and the state in which each turn starts."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import compress
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from kedge.algorithm.experience import Rollout
from kedge.algorithm.masking import check_same_shape, in_float64, keep_counted, unpadded


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
            actions: the policy's tokens. The first one always starts a turn.
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
        counted = in_float64(keep_counted(x, self.mask))
        return torch.zeros_like(counted).scatter_add(-1, self.first.to(counted.device), counted).to(x)

    def spread(self, x: Float[Tensor, "*batch time"]) -> Float[Tensor, "*batch time"]:
        """Copy the entry at the first slot of each turn to all of its counted slots."""
        return keep_counted(x.gather(-1, self.first), self.mask)

    def averaged(self, x: Float[Tensor, "*batch time"]) -> Float[Tensor, "*batch time"]:
        """Replace each counted entry by the mean of its turn."""
        counts = self.summed(torch.ones_like(x)).clamp(min=1)
        return self.spread(self.summed(x) / counts)


def turn_states(rollout: Rollout, starts: Bool[Tensor, "batch time"]) -> Int[Tensor, "batch time"]:
    """Number the states in which turns start, by the tokens that the policy has read since its last turn.

    That is the environment's answer; before a first turn, or in a new context without an answer of the policy, it is
    the whole context. States are equal if these token ids are, and the prompts are of one group.

    Args:
        rollout: the responses. Without `parents`, each token follows the one that was read before it.
        starts: True at the first token of each turn.

    Returns:
        Numbers at the first tokens, −1 elsewhere.

    Source: the anchor states of GiGPO (arXiv 2505.10978) eq. 6.
    """
    states = torch.full_like(rollout.response_ids, -1)
    numbers = dict[tuple[Any, ...], int]()
    before = rollout.parents
    if before is None:
        slots = torch.arange(starts.shape[1], device=starts.device)
        newest = torch.where(rollout.token_mask, slots, -1).cummax(-1).values
        before = pad(newest[:, :-1], (1, 0), value=-1)
    tables = (rollout.group, rollout.response_ids, rollout.action_mask, before, starts)
    prompts = unpadded(rollout.prompt_ids, rollout.prompt_mask)
    rows = zip(prompts, *(cast("Any", table).tolist() for table in tables), strict=True)
    for row, (prompt, group, ids, is_own, parents, begins) in enumerate(rows):
        for slot in compress(range(len(begins)), begins):
            read: list[int] = []
            at = parents[slot]
            while at >= 0 and not is_own[at]:
                read.append(ids[at])
                at = parents[at]
            context = prompt[: len(prompt) + 1 + at] if at < 0 else list[int]()
            key = (group, *context, *reversed(read))
            states[row, slot] = numbers.setdefault(key, len(numbers))
    return states
