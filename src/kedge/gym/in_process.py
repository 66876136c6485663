"""Environments in this process, stepped one after the other: the fastest way where a step takes microseconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np

from kedge.gym.environments import Record, checked_observation, observation_buffer
from kedge.gym.failures import failure_of
from kedge.gym.replay import EpisodeLog, fingerprint
from kedge.gym.spaces import Spaces

__all__ = ["InProcessEnvironments"]


class InProcessEnvironments:
    """N environments, each of whose episodes begins from a seed of its own.

    Args:
        environments: They are owned: `close` closes them.
        spaces: Of each.
        seed: Of the run; with the environment's number and the episode's it makes the episode's seed.
        name: Of the environment.

    Raises:
        EnvError: An environment raises an error, here or later, or gives something that cannot be used.
    """

    def __init__(
        self, environments: Sequence[gymnasium.Env[Any, Any]], spaces: Spaces, *, seed: int, name: str = "environment"
    ) -> None:
        self.name, self.spaces, self.num_envs = name, spaces, len(environments)
        self._environments = list(environments)
        self._logs = [EpisodeLog(seed, number) for number in range(self.num_envs)]
        self.observations = observation_buffer(spaces, self.num_envs)
        self.starts = np.ones(self.num_envs, np.bool_)
        # In the shape that the environments give them; both are views of one buffer.
        self._shaped = self.observations.reshape(self.num_envs, *spaces.observation_shape)
        for number in range(self.num_envs):
            self._begin(number)

    def _begin(self, number: int) -> None:
        self._reset(number, self._logs[number].begin())
        self.starts[number] = True

    def _reset(self, number: int, seed: int) -> None:
        shape = self.spaces.observation_shape
        try:
            observation, _ = self._environments[number].reset(seed=seed)
            self._shaped[number] = checked_observation(observation, self.spaces)
        except (Exception, SystemExit) as error:  # of the user's code
            raise failure_of(self.name, "reset", error, shape) from error

    def _take(self, number: int, action: Any) -> tuple[float, bool, bool]:
        """Take a step; return the reward, whether the episode ended, and whether it was cut off."""
        shape = self.spaces.observation_shape
        try:
            observation, reward, terminated, truncated, _ = self._environments[number].step(action)
            self._shaped[number] = checked_observation(observation, self.spaces)
            return float(reward), bool(terminated), bool(truncated)
        except (Exception, SystemExit) as error:  # of the user's code
            raise failure_of(self.name, "step", error, shape) from error

    def step(self, actions: Any, step: int, record: Record) -> None:
        """See `Environments`."""
        for number in range(self.num_envs):
            action = actions[number]
            record.rewards[step, number], terminated, truncated = self._take(number, action)
            self._logs[number].actions.append(action)
            if terminated or truncated:
                record.terminated[step, number], record.truncated[step, number] = terminated, truncated
                if not terminated:
                    record.final[step, number] = self.observations[number].copy()
                self._begin(number)
            else:
                self.starts[number] = False

    def state_dict(self) -> dict[str, Any]:
        """See `Environments`: each episode's number and actions, from which the state is made again."""
        return {"environments": [log.state_dict(self._shaped[number]) for number, log in enumerate(self._logs)]}

    def load_state_dict(self, state: Mapping[str, Any], /) -> list[int]:
        """See `Environments`. An environment is not restored if its last observation is another one."""
        return [number for number, each in enumerate(state["environments"]) if not self._replay(number, each)]

    def _replay(self, number: int, state: Mapping[str, Any]) -> bool:
        log = self._logs[number]
        log.load_state_dict(state)
        self._reset(number, log.seed)
        ended = False
        for action in log.actions:
            _, terminated, truncated = self._take(number, action)
            if ended := terminated or truncated:
                break
        self.starts[number] = not log.actions
        if ended or not log.is_whole or fingerprint(self._shaped[number]) != state["observation"]:
            self._begin(number)
            return False
        return True

    def close(self) -> None:
        """See `Environments`."""
        for environment in self._environments:
            environment.close()
