"""Returns and lengths of finished episodes."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from kedge.gym.rollout import Steps

__all__ = ["Episode", "Episodes"]


class Episode(NamedTuple):
    """A finished episode.

    Attributes:
        total: The sum of its rewards, as the environment gave them.
        length: Its steps.
    """

    total: float
    length: int


class Episodes:
    """The finished episodes of a run.

    Args:
        num_envs: Environments.
        window: The latest episodes whose mean is reported.
    """

    def __init__(self, num_envs: int, window: int = 100) -> None:
        self.latest: deque[Episode] = deque(maxlen=window)
        self.num_episodes = 0
        self._total, self._length = np.zeros(num_envs), np.zeros(num_envs, np.int64)

    def add(self, steps: Steps) -> list[Episode]:
        """Add a rollout and return the episodes that finished in it, in order of their ends."""
        self._total[steps.starts.numpy()] = 0.0
        self._length[steps.starts.numpy()] = 0
        rewards, valid = steps.rewards.numpy(), steps.valid.numpy()
        ends = (steps.terminated | steps.truncated).numpy() & valid
        found: list[tuple[int, int, Episode]] = []
        for env in range(len(self._total)):
            first = 0
            for end in np.flatnonzero(ends[:, env]).tolist():
                self._count(env, rewards[first : end + 1, env], valid[first : end + 1, env])
                found.append((end, env, Episode(float(self._total[env]), int(self._length[env]))))
                self._total[env], self._length[env], first = 0.0, 0, end + 1
            self._count(env, rewards[first:, env], valid[first:, env])
        finished = [episode for _, _, episode in sorted(found)]
        self.latest.extend(finished)
        self.num_episodes += len(finished)
        return finished

    def _count(self, env: int, rewards: np.ndarray, valid: np.ndarray) -> None:
        self._total[env] += rewards[valid].sum()
        self._length[env] += valid.sum()

    def metrics(self, finished: list[Episode]) -> dict[str, float]:
        """Of the latest episodes, and of those that finished in this update; without episodes only their number."""
        recent = _means("episode", self.latest)
        update = _means("episode/update", finished)
        return {**recent, **update, "episode/count": len(finished), "episode/total": self.num_episodes}

    def state_dict(self) -> dict[str, Any]:
        """The state, as JSON types."""
        return {
            "latest": [list(each) for each in self.latest],
            "num_episodes": self.num_episodes,
            "total": self._total.tolist(),
            "length": self._length.tolist(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`."""
        self.latest = deque((Episode(*each) for each in state["latest"]), maxlen=self.latest.maxlen)
        self.num_episodes = int(state["num_episodes"])
        self._total, self._length = np.array(state["total"], np.float64), np.array(state["length"], np.int64)


def _means(name: str, episodes: deque[Episode] | list[Episode]) -> dict[str, float]:
    if not episodes:
        return {}
    totals, lengths = zip(*episodes, strict=True)
    separator = "/" if name == "episode" else "_"
    return {
        f"{name}{separator}return_mean": float(np.mean(totals)),
        f"{name}{separator}return_std": float(np.std(totals)),
        f"{name}{separator}length_mean": float(np.mean(lengths)),
    }
