"""Each environment's episode as its seed and actions, from which the environment's state can be made again."""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

MOST_ACTIONS = 200_000
"""Actions of an episode that are kept: replaying more would take minutes, and so would saving them in every update."""

__all__ = ["EpisodeLog", "episode_seed", "fingerprint"]


def episode_seed(seed: int, environment: int, episode: int) -> int:
    """The seed of an episode: below 2³¹, as emulators take it, and independent of those of all others."""
    return int(np.random.SeedSequence([seed, environment, episode]).generate_state(1)[0]) & 0x7FFF_FFFF


def fingerprint(observation: Any) -> str:
    """SHA-256 of an observation's bytes."""
    return hashlib.sha256(np.ascontiguousarray(observation).tobytes()).hexdigest()


class EpisodeLog:
    """One environment's current episode.

    Args:
        seed: Of the run.
        environment: The environment's number.

    Attributes:
        episode: The current episode's number.
        actions: Its actions so far.
        is_whole: All actions are known; False for an episode that is longer than `MOST_ACTIONS`.
    """

    def __init__(self, seed: int, environment: int) -> None:
        self._seed, self._environment = seed, environment
        self.episode = -1
        self.actions: list[Any] = []
        self.is_whole = True

    def begin(self) -> int:
        """Start the next episode and return its seed."""
        self.episode += 1
        self.actions, self.is_whole = [], True
        return self.seed

    @property
    def seed(self) -> int:
        """The current episode's seed."""
        return episode_seed(self._seed, self._environment, self.episode)

    def state_dict(self, observation: Any) -> dict[str, Any]:
        """The state, as JSON types; the observation shows later whether the episode could be made again."""
        if len(self.actions) > MOST_ACTIONS:
            self.is_whole = False
        if not self.is_whole:
            self.actions = []
        actions = np.array(self.actions)
        return {
            "episode": self.episode,
            "is_whole": self.is_whole,
            "actions": base64.b64encode(zlib.compress(actions.tobytes(), 1)).decode(),
            "dtype": actions.dtype.str,
            "shape": list(actions.shape),
            "observation": fingerprint(observation),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`; the actions are those to take again."""
        actions = np.frombuffer(zlib.decompress(base64.b64decode(state["actions"])), np.dtype(state["dtype"]))
        actions = actions.reshape(state["shape"])
        self.episode, self.is_whole = int(state["episode"]), bool(state["is_whole"])
        # A single choice is a Python integer, as it was when it was first taken.
        self.actions = actions.tolist() if actions.ndim == 1 and actions.dtype.kind == "i" else list(actions.copy())
