"""The steps of a rollout, and the episodes that end in them."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kedge_control.spaces import Array


@dataclass(frozen=True)
class MemoryRecord:
    """The memory of a policy during a rollout.

    Attributes:
        before: Before each step.
        final: After each step that cut off an episode, in the order of `Steps.final_steps`.
        last: At the end.
    """

    before: Float[Tensor, "time envs 2 units"]
    final: Float[Tensor, "cuts 2 units"]
    last: Float[Tensor, "envs 2 units"]


@dataclass(frozen=True)
class Steps:
    """A rollout of T steps in N environments.

    Attributes:
        observations: The policy's inputs as returned by the environment: numbers, or images of bytes [T, N, …].
        actions: The policy's choices [T, N, components]: float32 numbers, unclipped and not squashed, or int64.
        rewards: As returned by the environments, float64.
        terminated: The episode ended in this step, by the task's own rules.
        truncated: The episode was cut off in this step, and would have continued.
        valid: True if the action was taken; False for a step that only started a new episode.
        starts: True where an environment's first observation here is an episode's first.
        final_observations: The last observation of each episode that was cut off [cuts, …].
        final_steps: Step and environment of each of these.
        last_observations: The inputs of the next step [N, …].
        memories: The record of a policy's memory; None without a memory.
    """

    observations: Array
    actions: Array
    rewards: Float[Array, "time envs"]
    terminated: Bool[Array, "time envs"]
    truncated: Bool[Array, "time envs"]
    valid: Bool[Array, "time envs"]
    starts: Bool[Array, " envs"]
    final_observations: Array
    final_steps: Int[Array, "cuts 2"]
    last_observations: Array
    memories: MemoryRecord | None = None

    @property
    def num_transitions(self) -> int:
        """Steps with an action."""
        return int(self.valid.sum())


class Episode(NamedTuple):
    """A finished episode.

    Attributes:
        total: The sum of its rewards, as returned by the environment.
        length: Its steps.
    """

    total: float
    length: int


class Episodes:
    """The finished episodes of a run.

    Args:
        num_envs: Environments.
        window: Number of latest episodes in the reported mean.
    """

    def __init__(self, num_envs: int, window: int = 100) -> None:
        self.latest: deque[Episode] = deque(maxlen=window)
        self.num_episodes = 0
        self._totals = np.zeros(num_envs)
        self._lengths = np.zeros(num_envs, np.int64)

    def add(self, steps: Steps) -> list[Episode]:
        """Add a rollout and return the episodes that finished in it, in order of their ends."""
        self._clear(steps.starts)
        valid = steps.valid
        rewards = np.where(valid, steps.rewards, 0.0)
        ends = (steps.terminated | steps.truncated) & valid
        finished: list[Episode] = []
        first = 0
        for step in [*np.flatnonzero(ends.any(1)).tolist(), len(ends) - 1]:
            self._totals += rewards[first : step + 1].sum(0)
            self._lengths += valid[first : step + 1].sum(0)
            if first <= step:
                numbers = np.flatnonzero(ends[step])
                finished += map(Episode, self._totals[numbers].tolist(), self._lengths[numbers].tolist())
                self._clear(ends[step])
            first = step + 1
        self.latest.extend(finished)
        self.num_episodes += len(finished)
        return finished

    def _clear(self, mask: Array) -> None:
        self._totals[mask] = 0.0
        self._lengths[mask] = 0

    def metrics(self, finished: Collection[Episode]) -> dict[str, float]:
        """Compute metrics of the latest episodes, and of those finished in this update; without episodes, only their
        number.
        """
        recent = means("episode/", self.latest)
        update = means("episode/update_", finished)
        return {**recent, **update, "episode/count": len(finished), "episode/total": self.num_episodes}

    def state_dict(self) -> dict[str, Any]:
        """The state, as JSON types."""
        return {
            "latest": [list(each) for each in self.latest],
            "num_episodes": self.num_episodes,
            "totals": self._totals.tolist(),
            "lengths": self._lengths.tolist(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`."""
        self.latest = deque((Episode(*each) for each in state["latest"]), maxlen=self.latest.maxlen)
        self.num_episodes = int(state["num_episodes"])
        self._totals = np.array(state["totals"], np.float64)
        self._lengths = np.array(state["lengths"], np.int64)


def means(prefix: str, episodes: Collection[Episode]) -> dict[str, float]:
    """Mean and deviation of the returns, and mean length, as metrics with this prefix; none without episodes."""
    if not episodes:
        return {}
    totals, lengths = zip(*episodes, strict=True)
    return {
        f"{prefix}return_mean": float(np.mean(totals)),
        f"{prefix}return_std": float(np.std(totals)),
        f"{prefix}length_mean": float(np.mean(lengths)),
    }
