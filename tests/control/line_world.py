"""A task small enough to compute by hand, and one that never begins the same way twice."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class LineWorld(gymnasium.Env[Any, Any]):
    """The state counts up from 0 by one per step. Reward: 10·episode + state after the step.

    Episode 0 is cut off after 2 steps, episode 1 ends after 2 steps, and so on by turns; episodes are counted by the
    environment itself.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self.episode, self.state = -1, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode, self.state = self.episode + 1, 0
        return self._seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.state += 1
        ends = self.state == 2
        cut = self.episode % 2 == 0
        return self._seen(), 10.0 * self.episode + self.state, ends and not cut, ends and cut, {}

    def _seen(self) -> Any:
        return np.array([self.episode, self.state], np.float64)


class Unrepeatable(LineWorld):
    """Its states depend on how often it was reset, whatever the seed."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.state += 1
        return self._seen(), 1.0, False, False, {}
