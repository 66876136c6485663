"""Rollouts of several turns, from drawings of their slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kedge.algorithm.experience import Rollout

MIXED = ("CC-rrCCCr", "C-C-CrC..", "rCCCCr...", "CxC-rCrrr")
"""Turns of several tokens and of one, with and without something to read between them."""


def slots_of(drawing: str) -> tuple[str, list[int]]:
    """A row's slots without the marks `-`, and the first slot of each turn.

    C is a token of the policy, r one that is only read, x a slot in neither mask, . padding. A turn begins at the first
    C, after `-`, and at each C after an r.
    """
    slots, starts, begins = "", list[int](), True
    for mark in drawing:
        begins = begins or mark in "-r"
        if mark == "C" and begins:
            starts.append(len(slots))
            begins = False
        slots += mark.replace("-", "")
    return slots, starts


def rollout_of(drawings: Sequence[str], *, seed: int = 0, group: Sequence[int] | None = None, **fields: Any) -> Rollout:
    """A rollout in float64 whose log probabilities are drawn."""
    rows, starts = zip(*map(slots_of, drawings), strict=True)
    width, number = max(map(len, rows)), len(rows)
    marks = [row.ljust(width, ".") for row in rows]

    def where(names: str) -> Tensor:
        return torch.tensor([[mark in names for mark in row] for row in marks])

    turn_starts = torch.zeros(number, width, dtype=torch.bool)
    for row, firsts in enumerate(starts):
        turn_starts[row, firsts] = True
    given: dict[str, Any] = {
        "prompt_ids": torch.full((number, 2), 3),
        "prompt_mask": torch.ones(number, 2, dtype=torch.bool),
        "response_ids": torch.randint(3, 250, (number, width), generator=torch.Generator().manual_seed(seed)),
        "token_mask": where("Cr"),
        "action_mask": where("C"),
        "logprobs": torch.where(where("C"), drawn(number, width, seed=seed + 1) - 2.0, 0.0),
        "stopped": torch.ones(number, dtype=torch.bool),
        "group": torch.arange(number) if group is None else torch.tensor(group),
        "policy_version": torch.zeros(number, dtype=torch.long),
        "turn_starts": turn_starts,
    }
    return Rollout(**{**given, **fields})


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def turns_of(rollout: Rollout, row: int) -> list[list[int]]:
    """The slots of each turn, from a loop over a row; without `turn_starts` there is one turn."""
    turns: list[list[int]] = []
    for slot in range(rollout.action_mask.shape[1]):
        if rollout.action_mask[row, slot]:
            if not turns or (rollout.turn_starts is not None and rollout.turn_starts[row, slot]):
                turns.append([])
            turns[-1].append(slot)
    return turns
