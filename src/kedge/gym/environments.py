"""Environments side by side: what a rollout needs of them, whatever runs them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from kedge.gym.spaces import Spaces

__all__ = ["Environments", "Record", "checked_observation", "observation_buffer"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Record:
    """What happened in each step of a rollout, filled in by the environments.

    Attributes:
        rewards: As the environments gave them, float64 [time, envs].
        terminated: The episode ended in this step, by the task's own rules [time, envs].
        truncated: It was cut off in this step, and would go on [time, envs].
        valid: The policy's action was taken; False where an environment only began a new episode [time, envs].
        final: The last observation of each episode that was cut off, by step and environment.
    """

    rewards: Array
    terminated: Array
    truncated: Array
    valid: Array
    final: dict[tuple[int, int], Array]

    @classmethod
    def empty(cls, num_steps: int, num_envs: int) -> Record:
        """The record of a rollout that is to come."""
        shape = (num_steps, num_envs)
        ends = (np.zeros(shape, np.bool_) for _ in range(2))
        return cls(np.zeros(shape), *ends, valid=np.ones(shape, np.bool_), final={})


class Environments(Protocol):
    """N environments with the same spaces, each in an episode."""

    @property
    def name(self) -> str:
        """Of the environment, for messages."""
        ...

    @property
    def spaces(self) -> Spaces:
        """Of each environment."""
        ...

    @property
    def num_envs(self) -> int:
        """N."""
        ...

    @property
    def observations(self) -> Array:
        """What each policy acts on next: [N, d] float32, or images [N, …] uint8. Overwritten by the next step."""
        ...

    @property
    def starts(self) -> Array:
        """Whether that observation is an episode's first, bool [N]."""
        ...

    def step(self, actions: Any, step: int, record: Record) -> None:
        """Take a step in every environment; where an episode ends, the next begins.

        Args:
            actions: A row for each environment, as `ActionHead.executed` makes them.
            step: Where to write in the record.
            record: What happened.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """The state, as JSON types."""
        ...

    def load_state_dict(self, state: Mapping[str, Any], /) -> list[int]:
        """Restore a `state_dict`, and return the environments that could not be: they begin a new episode."""
        ...

    def close(self) -> None:
        """Free what the environments hold."""
        ...


def checked_observation(observation: Any, spaces: Spaces) -> Any:
    """An observation that is what the space says: numpy would repeat a smaller one, and cut fractions to bytes.

    Raises:
        ValueError: It has another shape, or an image other numbers than bytes.
    """
    if np.shape(observation) != spaces.observation_shape:
        raise ValueError(f"an observation of shape {np.shape(observation)}")
    if spaces.is_image and np.asarray(observation).dtype != np.uint8:
        raise ValueError(f"an image of {np.asarray(observation).dtype}, and its space is of bytes (uint8)")
    return observation


def observation_buffer(spaces: Spaces, *leading: int) -> Array:
    """A buffer for observations: bytes for images, else float32 rows of all numbers."""
    if spaces.is_image:
        return np.zeros((*leading, *spaces.observation_shape), np.uint8)
    return np.zeros((*leading, spaces.observation_size), np.float32)
