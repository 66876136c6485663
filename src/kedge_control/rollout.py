"""Plays a policy in environments: rollouts with a number of steps to learn from, and full episodes to evaluate it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from kedge_base.errors import ConfigError, EnvError, NumericsError
from kedge_control.environments import Environments, Record
from kedge_control.networks import ControlActorCritic, acting_function, blank_where
from kedge_control.normalization import Normalization
from kedge_control.spaces import Array, observation_buffer
from kedge_control.steps import Episode, MemoryRecord, Steps

MOST_STEPS = 200_000
"""Steps of an environment after which an unfinished episode of an evaluation is an error."""


class Memory:
    """The LSTM's state in each environment, from one rollout to the next; empty for a policy without a memory.

    It is blank at the start of every episode. In the update, sequences start with the memory of the rollout.

    Args:
        policy: The policy.
        num_envs: Environments.
    """

    def __init__(self, policy: ControlActorCritic, num_envs: int) -> None:
        self.state: Float[Tensor, "envs 2 units"] = policy.blank_memory(num_envs)

    def state_dict(self) -> dict[str, Any]:
        """The state, as JSON types."""
        return {"state": self.state.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`."""
        self.state = torch.tensor(state["state"], device=self.state.device).view_as(self.state)


def collect_steps(
    environments: Environments,
    policy: ControlActorCritic,
    normalization: Normalization,
    *,
    num_steps: int,
    generator: torch.Generator,
    memory: Memory | None = None,
) -> Steps:
    """Let the policy act for a number of steps in every environment.

    All noise is drawn at once beforehand, and log probabilities and values are computed in one pass afterwards. So the
    loop has little overhead besides the network and the environments.

    Args:
        environments: They continue from where they are.
        policy: Its weights do not change during the rollout.
        normalization: Frozen statistics.
        num_steps: T, of each environment.
        generator: Of the noise, on the CPU.
        memory: The memory of a policy with one, which it continues from; None for a blank memory.

    Raises:
        NumericsError: A reward or an observation is NaN or infinite.
        EnvError: No step had an action.
    """
    spaces = environments.spaces
    num_envs = environments.num_envs
    head = policy.head
    record = Record.empty(num_steps, num_envs)
    seen = observation_buffer(spaces, num_steps, num_envs)
    actions = np.zeros((num_steps, num_envs, spaces.action_size), np.float32 if head.is_continuous else np.int64)
    starts = environments.starts.copy()
    act = acting_function(policy, num_envs)
    memory = memory or Memory(policy, num_envs)
    # This also clears the memory of environments that could not be restored and therefore start a new episode.
    state = blank_where(environments.starts, memory.state)
    before: list[Tensor] = []
    cut_memories: dict[tuple[int, int], Tensor] = {}
    inputs = None
    for step, noise in enumerate(policy.draw_noise(num_steps, num_envs, generator).numpy()):
        seen[step] = environments.observations
        inputs = normalization.normalize(environments.observations, out=inputs)
        outputs, after = act(inputs, state)
        actions[step] = head.choose(outputs + noise)
        environments.step(head.executed(actions[step]), step, record)
        if policy.memory is not None:
            before.append(state)
            cut_memories |= {key: after[key[1]] for key in record.final.keys() - cut_memories.keys()}
            state = blank_where(environments.starts, after)
    _check_finite(environments, seen, record)
    memory.state = state.clone()
    cuts = sorted(record.final)
    memories = None
    if policy.memory is not None:
        final = torch.stack([cut_memories[cut] for cut in cuts]) if cuts else memory.state[:0]
        memories = MemoryRecord(torch.stack(before), final, memory.state)
    final_observations = np.stack([record.final[cut] for cut in cuts]) if cuts else observation_buffer(spaces, 0)
    return Steps(
        observations=seen,
        actions=actions,
        rewards=record.rewards,
        terminated=record.terminated,
        truncated=record.truncated,
        valid=record.valid,
        starts=starts,
        final_observations=final_observations,
        final_steps=np.array(cuts, np.int64).reshape(-1, 2),
        last_observations=environments.observations.copy(),
        memories=memories,
    )


def _check_finite(environments: Environments, seen: Array, record: Record) -> None:
    """Report an environment's mistake before it appears as a non-finite loss."""
    last = environments.observations[None]
    ends = [("an observation", each[None, None], key) for key, each in record.final.items()]
    tables = [("a reward", record.rewards, (0, 0)), ("an observation", seen, (0, 0))]
    for what, numbers, (first, env) in (*tables, ("an observation", last, (len(seen), 0)), *ends):
        if numbers.dtype != np.uint8 and not np.isfinite(numbers).all():
            place = np.argwhere(~np.isfinite(numbers))[0].tolist()
            raise NumericsError(
                f"environment {environments.name!r} gave {what} that is not finite, in step {first + place[0] + 1} of "
                f"the rollout (environment {env + place[1] + 1} of {environments.num_envs})"
            )
    if not record.valid.any():
        raise EnvError(
            f"environment {environments.name!r} only started episodes in this rollout, which leaves nothing to learn "
            "from; set control.num_steps to at least 2"
        )


@torch.inference_mode()
def play_episodes(
    environments: Environments,
    policy: ControlActorCritic,
    normalization: Normalization,
    *,
    num_episodes: int,
) -> list[Episode]:
    """Play episodes with the most probable actions from their start, in the order of the environments.

    Every environment plays its share: counting the first to finish would favor short episodes.

    Args:
        environments: In the first state of an episode each, such as newly made ones.
        policy: Its weights do not change.
        normalization: Frozen statistics.
        num_episodes: Episodes in all.

    Raises:
        ConfigError: An episode does not end.
    """
    num_envs = environments.num_envs
    shares = [(num_episodes + number) // num_envs for number in range(num_envs)][::-1]
    finished: list[list[Episode]] = [[] for _ in range(num_envs)]
    totals = np.zeros(num_envs)
    lengths = np.zeros(num_envs, np.int64)
    act = acting_function(policy, num_envs)
    head = policy.head
    memory = policy.blank_memory(num_envs)
    for _ in range(MOST_STEPS):
        if all(len(own) >= share for own, share in zip(finished, shares, strict=True)):
            return [episode for own, share in zip(finished, shares, strict=True) for episode in own[:share]]
        record = Record.empty(1, num_envs)
        outputs, memory = act(normalization.normalize(environments.observations), memory)
        environments.step(head.executed(head.choose(outputs)), 0, record)
        memory = blank_where(environments.starts, memory)
        totals += np.where(record.valid[0], record.rewards[0], 0.0)
        lengths += record.valid[0]
        for number in np.flatnonzero(record.terminated[0] | record.truncated[0]).tolist():
            finished[number].append(Episode(float(totals[number]), int(lengths[number])))
            totals[number] = 0.0
            lengths[number] = 0
    raise ConfigError(
        f"an episode of {environments.name} did not end within {MOST_STEPS:,} steps; limit it: "
        "control.env_options={max_episode_steps: …}"
    )
