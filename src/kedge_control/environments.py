"""Runs environments side by side, through Gymnasium's vector interface, in each of its three ways to start an episode.

disabled    we reset: each episode starts from its own seed, and can be replayed
next step   the step after an episode's end ignores the action and only starts the next one: it is not valid
same step   the step that ends an episode already shows the next one's first observation
"""

from __future__ import annotations

import base64
import hashlib
import traceback
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, VectorEnv

from kedge.training.runtime import Terminated
from kedge_base.errors import DataError, EnvError
from kedge_base.machine.progress import say
from kedge_base.texts import error_text, place_of, typed_error_text
from kedge_control.spaces import Array, Spaces, checked_observation, observation_buffer, spaces_of

MOST_ACTIONS = 200_000
"""Maximum actions of an episode that are kept: replaying more would take minutes, and so would saving them in every
update.
"""

EXPECTED = {
    "reset": "reset(seed=…) to return (observation, info)",
    "step": "step(action) to return (observation, reward, terminated, truncated, info)",
}


@dataclass(frozen=True)
class Record:
    """The steps of a rollout, filled in by the environments.

    Attributes:
        rewards: As returned by the environments, float64 [time, envs].
        terminated: The episode ended in this step, by the task's own rules [time, envs].
        truncated: It was cut off in this step, and would have continued [time, envs].
        valid: The policy's action was taken; False where an environment only started a new episode [time, envs].
        final: The last observation of each episode that was cut off, by step and environment.
    """

    rewards: Array
    terminated: Array
    truncated: Array
    valid: Array
    final: dict[tuple[int, int], Array]

    @classmethod
    def empty(cls, num_steps: int, num_envs: int) -> Record:
        """Make an empty record for a rollout."""
        shape = (num_steps, num_envs)
        ends = (np.zeros(shape, np.bool_) for _ in range(2))
        return cls(np.zeros(shape), *ends, valid=np.ones(shape, np.bool_), final={})


class Checked(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An environment whose observations are checked, because numpy would silently convert wrong ones."""

    def __init__(self, environment: gymnasium.Env[Any, Any], spaces: Spaces) -> None:
        super().__init__(environment)
        self._spaces = spaces

    def reset(self, **options: Any) -> Any:
        """Reset the environment, and check its observation."""
        observation, info = self.env.reset(**options)
        return checked_observation(observation, self._spaces), info

    def step(self, action: Any) -> Any:
        """Take a step, and check its observation."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        return checked_observation(observation, self._spaces), reward, terminated, truncated, info


class InProcess(VectorEnv[Any, Any, Any]):
    """Environments that are stepped in turn.

    `SyncVectorEnv` also does this, but its copies take longer than a step of HalfCheetah in MuJoCo.

    Args:
        environments: Closed by `close`.
    """

    metadata = {"autoreset_mode": AutoresetMode.DISABLED}  # noqa: RUF012

    def __init__(self, environments: Sequence[gymnasium.Env[Any, Any]]) -> None:
        self.environments = environments
        self.num_envs = len(environments)
        self.single_observation_space = environments[0].observation_space
        self.single_action_space = environments[0].action_space
        spaces = spaces_of(self.single_observation_space, self.single_action_space)
        self._seen = observation_buffer(spaces, self.num_envs).reshape(self.num_envs, *spaces.observation_shape)
        self._rewards = np.zeros(self.num_envs)
        self._ends = np.zeros((2, self.num_envs), np.bool_)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
        """Reset the environments of `options["reset_mask"]`, or all."""
        mask = options["reset_mask"] if options else np.ones(self.num_envs, np.bool_)
        for number in np.flatnonzero(mask).tolist():
            self._seen[number], _ = self.environments[number].reset(seed=seed[number])
        return self._seen, {}

    def step(self, actions: Any) -> Any:
        """Take a step in every environment. The next step overwrites the result."""
        for number, environment in enumerate(self.environments):
            self._seen[number], reward, terminated, truncated, _ = environment.step(actions[number])
            self._rewards[number] = float(reward)
            self._ends[0, number] = terminated
            self._ends[1, number] = truncated
        return self._seen, self._rewards, *self._ends, {}

    def close_extras(self, **kwargs: Any) -> None:
        """Close the environments."""
        for environment in self.environments:
            environment.close()


class Environments:
    """N environments with the same spaces, each in an episode.

    Args:
        vector: The vectorized environment, in any of Gymnasium's three autoreset modes; `close` closes it.
        name: Name used in error messages.
        seed: The run's seed; combined with the environment's and the episode's number, it gives the episode's seed.

    Attributes:
        observations: The policy's next inputs: [N, d] float32, or images [N, …] uint8. Overwritten by `step`.
        starts: True where that observation is the first of an episode [N].
        lost: The environments that `load_state_dict` could not restore: they start a new episode.

    Raises:
        EnvError: An environment raises an error, here or in a later call, or returns something unusable.
    """

    def __init__(self, vector: VectorEnv[Any, Any, Any], name: str, *, seed: int = 0) -> None:
        self.name = name
        self.num_envs = vector.num_envs
        self.spaces = spaces_of(vector.single_observation_space, vector.single_action_space, name=name)
        self._vector = vector
        self._seed = seed
        self._mode = AutoresetMode(vector.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP))
        self.observations = observation_buffer(self.spaces, self.num_envs)
        self._shaped = self.observations.reshape(self.num_envs, *self.spaces.observation_shape)
        self.starts = np.ones(self.num_envs, np.bool_)
        self.lost: list[int] = []
        self._episodes = [-1] * self.num_envs
        self._actions: list[list[Any]] = [[] for _ in range(self.num_envs)]
        self._resumed = 0
        self._over = np.zeros(self.num_envs, np.bool_)  # in the next-step mode: where a step only starts an episode
        self._waits = False
        self._start_where(self.starts)

    @property
    def unwrapped(self) -> list[Any]:
        """The environments of this process without their wrappers, or else the vector environment."""
        each = self._vector.environments if isinstance(self._vector, InProcess) else [self._vector]
        return [environment.unwrapped for environment in each]

    def step(self, actions: Any, step: int, record: Record) -> None:
        """Take a step in every environment; where an episode ends, the next starts.

        Args:
            actions: A row for each environment, as returned by `ActionHead.executed`.
            step: The index in the record.
            record: The recorded step.
        """
        rewards, terminated, truncated, infos = self._call("step", self._batched(actions))
        record.rewards[step], record.terminated[step], record.truncated[step] = rewards, terminated, truncated
        if self._mode == AutoresetMode.NEXT_STEP:
            record.valid[step] = ~self._over
            record.terminated[step] &= ~self._over
            record.truncated[step] &= ~self._over
        ended = record.terminated[step] | record.truncated[step]
        for number in np.flatnonzero(ended & ~record.terminated[step]).tolist():
            record.final[step, number] = self._final(infos, number)
        if self._mode == AutoresetMode.NEXT_STEP:
            self.starts = self._over
            self._over = ended
            return
        self.starts = ended
        if self._mode == AutoresetMode.DISABLED:
            for log, action in zip(self._actions, actions, strict=True):
                if len(log) <= MOST_ACTIONS:  # one more shows that some are missing
                    log.append(action)
            if ended.any():
                self._start_where(ended)

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

    def _start_where(self, mask: Array) -> None:
        """Start an episode in these environments; in all of them if they reset themselves."""
        if self._mode == AutoresetMode.DISABLED:
            for number in np.flatnonzero(mask).tolist():
                self._episodes[number] += 1
                self._actions[number] = []
            self._reset(mask)
        else:
            self._call("reset", seed=_episode_seed(self._seed, 0, self._resumed))

    def _reset(self, mask: Array) -> None:
        """Put environments into the first state of their episodes."""
        seeds = [_episode_seed(self._seed, *numbers) for numbers in enumerate(self._episodes)]
        self._call("reset", seed=seeds, options={"reset_mask": mask.copy()})

    def state_dict(self) -> dict[str, Any]:
        """The state, as JSON types: seeds and actions of the episodes under way, if these can be replayed."""
        if self._mode != AutoresetMode.DISABLED:
            return {"resumed": self._resumed}
        return {"environments": [self._state(number) for number in range(self.num_envs)]}

    def _state(self, number: int) -> dict[str, Any]:
        log = self._actions[number]
        is_whole = len(log) <= MOST_ACTIONS
        actions = np.array(log if is_whole else [])
        return {
            "episode": self._episodes[number],
            "is_whole": is_whole,
            "actions": base64.b64encode(zlib.compress(actions.tobytes(), 1)).decode(),
            "dtype": actions.dtype.str,
            "shape": list(actions.shape),
            "observation": self._fingerprint(number),
        }

    def _fingerprint(self, number: int) -> str:
        """Hash an environment's observation, to check that its episode was replayed correctly."""
        return hashlib.sha256(self.observations[number].tobytes()).hexdigest()

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Restore a `state_dict`; episodes that cannot be restored are `lost`, with a message.

        Raises:
            DataError: The state has another number of environments.
        """
        if self._mode == AutoresetMode.DISABLED:
            if (saved := len(state["environments"])) != self.num_envs:
                raise DataError(
                    f"the checkpoint has the episodes of {saved} environments, but control.num_envs={self.num_envs}"
                )
            self._restore(state["environments"])
        else:
            self._resumed = int(state["resumed"]) + 1
            self.starts = np.ones(self.num_envs, np.bool_)
            self.lost = list(range(self.num_envs))
            self._over[:] = False
            self._start_where(self.starts)
        if self.lost:
            say(
                f"{len(self.lost)} of {self.num_envs} episodes could not be replayed: {self.name} does not repeat "
                "itself from a seed. They start again, and the run differs from one that was not interrupted."
            )

    def _restore(self, states: Sequence[Mapping[str, Any]]) -> None:
        self._episodes = [int(each["episode"]) for each in states]
        self._actions = [_saved_actions(each) for each in states]
        whole = self._replay()
        self.starts = np.array([not log for log in self._actions])
        same = [
            state["is_whole"] and self._fingerprint(number) == state["observation"]
            for number, state in enumerate(states)
        ]
        lost = ~(whole & same)
        self.lost = np.flatnonzero(lost).tolist()
        if self.lost:
            self.starts |= lost
            self._start_where(lost)

    def _replay(self) -> Array:
        """Repeat all logged actions, so that all episodes arrive together; return which of them did not end early.

        All environments step at once. Shorter episodes start later: until then, the environment takes arbitrary
        actions, which the reset with its seed undoes.
        """
        lengths = np.array([len(log) for log in self._actions])
        some = next((log[0] for log in self._actions if log), None)
        whole = np.ones(self.num_envs, np.bool_)
        self._reset(whole)
        begins = lengths.max() - lengths
        for step in range(lengths.max()):
            pairs = zip(self._actions, begins, strict=True)
            actions = [log[step - begin] if step >= begin else some for log, begin in pairs]
            _, terminated, truncated, _ = self._call("step", self._batched(actions))
            ended = np.asarray(terminated) | np.asarray(truncated)
            whole &= ~ended | (step < begins)
            again = ended | (begins == step + 1)
            if again.any():
                self._reset(again)
        return whole

    def _batched(self, actions: Any) -> Any:
        if isinstance(self._vector, InProcess):
            return actions
        return np.asarray(actions, dtype=self._vector.action_space.dtype)

    def _call(self, call: str, *arguments: Any, **options: Any) -> Any:
        """Call the environments, and return the result except for the observations, which are stored; errors and the
        end of a process get a one-line message.
        """
        self._waits = True
        try:
            self._shaped[:], *answer = getattr(self._vector, call)(*arguments, **options)
        except (EOFError, ConnectionError) as error:
            self._abandon()
            raise EnvError(f"environment {self.name!r}: one of its processes ended unexpectedly") from error
        except Terminated:  # of this process, by a signal
            raise
        except (Exception, SystemExit) as error:  # of the user's code
            raise self._failure(call, error) from error
        self._waits = False
        return answer

    def _failure(self, call: str, error: BaseException) -> EnvError:
        """The message for an error in an environment, or in reading its result, which happens in this package."""
        if Path(traceback.extract_tb(error.__traceback__)[-1].filename).parent != Path(__file__).parent:
            return EnvError(f"environment {self.name!r}: {call}() raised {reason_of(error)}")
        return EnvError(
            f"environment {self.name!r}: {call}() cannot be used: {error_text(error)}; "
            f"expected {EXPECTED[call]}, with an observation of shape {self.spaces.observation_shape}"
        )

    def _abandon(self) -> None:
        """Kill the other processes: an orderly close would wait for the one that is gone."""
        if isinstance(self._vector, AsyncVectorEnv):
            for process in self._vector.processes:
                process.kill()
                process.join()
        self._vector.closed = True

    def close(self) -> None:
        """Free the environments' resources. After an interrupted call it would wait for missing answers."""
        if self._waits:
            self._abandon()
        close_quietly(self._vector, self.name)


def close_quietly(environment: Any, name: str) -> None:
    """Close an environment; report an error without raising it, so that nothing trained is lost."""
    try:
        environment.close()
    except Terminated:
        raise
    except (Exception, SystemExit) as error:  # of the user's code
        say(f"environment {name!r}: close() raised {reason_of(error)}")


def reason_of(error: BaseException) -> str:
    """Return an error's type and text, with the file and line that raised it."""
    place = place_of(error)
    # Gymnasium raises a worker process's error again, and prints its traceback.
    shown = "see above" if place.startswith("async_vector_env.py:") else place
    return f"{typed_error_text(error)} ({shown})"


def _episode_seed(seed: int, environment: int, episode: int) -> int:
    """The seed of an episode: below 2³¹, as emulators take it, and independent of all other episodes' seeds."""
    return int(np.random.SeedSequence([seed, environment, episode]).generate_state(1)[0]) & 0x7FFF_FFFF


def _saved_actions(state: Mapping[str, Any]) -> list[Any]:
    raw = zlib.decompress(base64.b64decode(state["actions"]))
    actions = np.frombuffer(raw, np.dtype(state["dtype"])).reshape(state["shape"])
    # A single choice is a Python integer, as it was when it was first taken.
    return actions.tolist() if actions.ndim == 1 and actions.dtype.kind == "i" else list(actions.copy())
