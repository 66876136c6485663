"""What a recurrent policy remembers of each environment's episode: the state of its LSTM.

It is blank at the beginning of every episode. In the update, sequences begin with what was remembered in the rollout.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from kedge.gym.environments import Array, Record
from kedge.gym.networks import ControlActorCritic

__all__ = ["Memory", "MemoryRecord", "blank_where"]


def blank_where(starts: Array, state: Float[Tensor, "envs 2 units"]) -> Float[Tensor, "envs 2 units"]:
    """The memory, blank in environments whose next observation is an episode's first (a mask [envs])."""
    if not state.shape[-1] or not starts.any():
        return state
    return state.masked_fill(torch.from_numpy(starts).to(state.device)[:, None, None], 0.0)


class Memory:
    """The memory in each environment, from one rollout to the next; empty for a policy without.

    Args:
        policy: The policy.
        num_envs: Environments; every memory is blank.
    """

    def __init__(self, policy: ControlActorCritic, num_envs: int) -> None:
        self.state: Float[Tensor, "envs 2 units"] = policy.blank_memory(num_envs)

    def after(self, starts: Array) -> Float[Tensor, "envs 2 units"]:
        """The memory, blank where an episode begins: also one that begins because it could not be restored."""
        return blank_where(starts, self.state)

    def state_dict(self) -> dict[str, Any]:
        """The state, as JSON types."""
        numbers = np.ascontiguousarray(self.state.cpu().numpy())
        return {"shape": list(numbers.shape), "numbers": base64.b64encode(numbers.tobytes()).decode()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`."""
        numbers = np.frombuffer(base64.b64decode(state["numbers"]), np.float32).reshape(state["shape"])
        self.state = torch.from_numpy(numbers.copy()).to(self.state.device)


@dataclass(frozen=True)
class MemoryRecord:
    """What a policy remembered during a rollout.

    Attributes:
        before: Before each step.
        cuts: After each step in which an episode was cut off, by step and environment.
        final: The same, in the order of `Steps.final_steps`.
        last: At the end.
    """

    before: Float[Tensor, "time envs 2 units"]
    cuts: dict[tuple[int, int], Tensor]
    final: Float[Tensor, "cuts 2 units"]
    last: Float[Tensor, "envs 2 units"]

    @classmethod
    def empty(cls, num_steps: int, memory: Memory) -> MemoryRecord:
        """The record of a rollout that is to come."""
        state = memory.state
        return cls(state.new_zeros(num_steps, *state.shape), {}, state[:0], state)

    def note_cuts(self, step: int, after: Float[Tensor, "envs 2 units"], record: Record) -> None:
        """Note the memory where episodes were cut off in this step."""
        for number in np.flatnonzero(record.truncated[step] & ~record.terminated[step]).tolist():
            self.cuts[step, number] = after[number]

    def complete(self, memory: Memory, cuts: list[tuple[int, int]]) -> MemoryRecord:
        """The record of the whole rollout."""
        final = torch.stack([self.cuts[cut] for cut in cuts]) if cuts else self.final
        return replace(self, cuts={}, final=final, last=memory.state)
