"""Environments behind Gymnasium's vector interface, in each of its three ways to begin the next episode.

disabled    the caller resets: episodes begin from seeds of their own, and can be replayed
next step   the step after an episode's end ignores the action and only begins the next one: it is not valid
same step   the step that ends an episode already shows the next one's first observation
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, VectorEnv

from kedge.errors import EnvError
from kedge.gym.environments import Array, Record, observation_buffer
from kedge.gym.failures import failure_of
from kedge.gym.replay import EpisodeLog, episode_seed, fingerprint
from kedge.gym.spaces import Spaces

__all__ = ["VectorizedEnvironments"]


class VectorizedEnvironments:
    """N environments of a vector environment.

    Args:
        vector: It is owned: `close` closes it.
        spaces: Of each environment.
        seed: Of the run.
        name: Of the environment.
        make: Makes the vector environment from a seed, where `reset` takes none; None where it does.
    """

    def __init__(
        self,
        vector: VectorEnv[Any, Any, Any],
        spaces: Spaces,
        *,
        seed: int,
        name: str,
        make: Callable[[int], VectorEnv[Any, Any, Any]] | None = None,
    ) -> None:
        self.name, self.spaces, self.num_envs = name, spaces, vector.num_envs
        self._vector, self._make, self._seed, self._resumed, self._waits = vector, make, seed, 0, False
        # Vector environments from before the modes, such as EnvPool's, reset on the next step.
        self._mode = AutoresetMode(vector.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP))
        self._logs = [EpisodeLog(seed, number) for number in range(self.num_envs)]
        self.observations = observation_buffer(spaces, self.num_envs)
        self._shaped = self.observations.reshape(self.num_envs, *spaces.observation_shape)
        self.starts = np.ones(self.num_envs, np.bool_)
        # In the next-step mode: where the next step only begins an episode.
        self._over = np.zeros(self.num_envs, np.bool_)
        self._begin_all()

    def _begin_all(self) -> None:
        if self._mode == AutoresetMode.DISABLED:
            seeds: Any = [log.begin() for log in self._logs]
        else:
            seeds = episode_seed(self._seed, 0, self._resumed)
        if self._make is not None:
            self._vector.close()
            self._vector, seeds = self._make(seeds), None
        with self._contact("reset"):
            self._shaped[:], _ = self._vector.reset(seed=seeds)
        self.starts[:], self._over[:] = True, False

    def step(self, actions: Any, step: int, record: Record) -> None:
        """See `Environments`."""
        with self._contact("step"):
            self._shaped[:], rewards, terminated, truncated, infos = self._vector.step(self._batched(actions))
            record.rewards[step], record.terminated[step], record.truncated[step] = rewards, terminated, truncated
        ended = record.terminated[step] | record.truncated[step]
        if self._mode == AutoresetMode.NEXT_STEP:
            record.valid[step] = ~self._over
            for row in (record.terminated, record.truncated):
                row[step] &= ~self._over
            ended &= ~self._over
        cut = record.truncated[step] & ~record.terminated[step]
        for number in np.flatnonzero(cut).tolist():
            record.final[step, number] = self._final(infos, number)
        self._finish(actions, ended)

    def _final(self, infos: Mapping[str, Any], number: int) -> Array:
        """The last observation of an episode that was cut off."""
        if self._mode != AutoresetMode.SAME_STEP:
            return self.observations[number].copy()
        finals = infos.get("final_obs")
        if finals is None or finals[number] is None:
            raise EnvError(f"environment {self.name!r} gave no infos['final_obs'] of an episode that was cut off")
        last = observation_buffer(self.spaces, 1)
        last.reshape(self.spaces.observation_shape)[:] = finals[number]
        return last[0]

    def _finish(self, actions: Any, ended: Array) -> None:
        """Begin the next episodes, or note that the environments do."""
        if self._mode == AutoresetMode.DISABLED:
            for log, action in zip(self._logs, actions, strict=True):
                log.actions.append(action)
            self.starts[:] = ended
            self._reset_where(ended)
        elif self._mode == AutoresetMode.NEXT_STEP:
            self.starts, self._over = self._over, ended
        else:
            self.starts = ended

    def _reset_where(self, mask: Array) -> None:
        if not mask.any():
            return
        seeds: Any = [log.begin() if counts else None for log, counts in zip(self._logs, mask, strict=True)]
        with self._contact("reset"):
            self._shaped[:], _ = self._vector.reset(seed=seeds, options={"reset_mask": mask.copy()})

    def state_dict(self) -> dict[str, Any]:
        """See `Environments`; only with disabled automatic resets can the episodes be made again."""
        if self._mode != AutoresetMode.DISABLED:
            return {"resumed": self._resumed}
        return {"environments": [log.state_dict(self._shaped[number]) for number, log in enumerate(self._logs)]}

    def load_state_dict(self, state: Mapping[str, Any], /) -> list[int]:
        """See `Environments`."""
        if self._mode != AutoresetMode.DISABLED:
            self._resumed = int(state["resumed"]) + 1
            self._begin_all()
            return list(range(self.num_envs))
        for log, each in zip(self._logs, state["environments"], strict=True):
            log.load_state_dict(each)
        whole = self._replay()
        self.starts[:] = [not log.actions for log in self._logs]
        same = [
            ok
            and self._logs[number].is_whole
            and fingerprint(self._shaped[number]) == state["environments"][number]["observation"]
            for number, ok in enumerate(whole)
        ]
        others = ~np.array(same)
        self.starts |= others
        self._reset_where(others)
        return np.flatnonzero(others).tolist()

    def _replay(self) -> list[bool]:
        """Take all logged actions again, so that all episodes arrive together; return which ran to their end.

        All environments step at once. Shorter episodes begin later: until then, the environment takes some action,
        and its seed makes it forget that.
        """
        lengths = [len(log.actions) for log in self._logs]
        longest = max(lengths)
        some = next((log.actions[0] for log in self._logs if log.actions), None)
        whole = [True] * self.num_envs
        seeds: Any = [log.seed for log in self._logs]
        with self._contact("step"):
            self._shaped[:], _ = self._vector.reset(seed=seeds)
            for step in range(longest):
                begins = [longest - length for length in lengths]
                actions = [
                    log.actions[step - begin] if step >= begin else some
                    for log, begin in zip(self._logs, begins, strict=True)
                ]
                self._shaped[:], _, terminated, truncated, _ = self._vector.step(self._batched(actions))
                ended = np.asarray(terminated) | np.asarray(truncated)
                for number in np.flatnonzero(ended).tolist():
                    whole[number] &= step < begins[number]
                again = ended | np.array([step + 1 == begin for begin in begins])
                if again.any():
                    self._shaped[:], _ = self._vector.reset(seed=seeds, options={"reset_mask": again})
        return whole

    def _batched(self, actions: Any) -> Array:
        return np.asarray(actions, dtype=self._vector.action_space.dtype)

    @contextmanager
    def _contact(self, call: str) -> Iterator[None]:
        """Turn errors of the environments, and the end of a worker process, into one line."""
        self._waits = True
        try:
            yield
            self._waits = False
        except (EOFError, ConnectionError) as error:
            self._abandon()
            raise EnvError(f"environment {self.name!r}: one of its processes ended unexpectedly") from error
        except (Exception, SystemExit) as error:  # of the user's code
            raise failure_of(self.name, call, error, self._shaped.shape) from error

    def _abandon(self) -> None:
        """End the other processes: an orderly close would wait for the one that is gone."""
        if isinstance(self._vector, AsyncVectorEnv):
            for process in self._vector.processes:
                process.kill()
                process.join()
        self._vector.closed = True

    def close(self) -> None:
        """See `Environments`. After a call that was interrupted, answers are missing that a close would wait for."""
        if self._waits:
            self._abandon()
        else:
            self._vector.close()
