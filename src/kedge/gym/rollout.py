"""Rollouts: what a policy does in its environments for a number of steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kedge.errors import EnvError, NumericsError
from kedge.gym.acting import acting_function
from kedge.gym.environments import Environments, Record, observation_buffer
from kedge.gym.memory import Memory, MemoryRecord, blank_where
from kedge.gym.networks import ControlActorCritic
from kedge.gym.normalization import Normalization

__all__ = ["Steps", "collect_steps"]


@dataclass(frozen=True)
class Steps:
    """A rollout of T steps in N environments.

    Attributes:
        observations: What the policy acted on, as the environments gave it: numbers, or images of bytes [T, N, …].
        actions: What it chose [T, N, components]: float32 numbers, unclipped and not squashed, or int64.
        rewards: As the environments gave them, float64.
        terminated: The episode ended in this step, by the task's own rules.
        truncated: The episode was cut off in this step, and would go on.
        valid: The action was taken; False for a step in which the environment only began a new episode.
        starts: Whether each environment's first observation here is an episode's first.
        final_observations: The last observation of each episode that was cut off [cuts, …].
        final_steps: Step and environment of each of these.
        last_observations: What the policy acts on next [N, …].
        memories: What a policy with a memory remembered meanwhile; None without one.
    """

    observations: Tensor
    actions: Tensor
    rewards: Float[Tensor, "time envs"]
    terminated: Bool[Tensor, "time envs"]
    truncated: Bool[Tensor, "time envs"]
    valid: Bool[Tensor, "time envs"]
    starts: Bool[Tensor, " envs"]
    final_observations: Tensor
    final_steps: Int[Tensor, "cuts 2"]
    last_observations: Tensor
    memories: MemoryRecord | None = None

    @property
    def num_transitions(self) -> int:
        """Steps in which an action was taken."""
        return int(self.valid.sum())


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

    All noise is drawn at once, beforehand; log probabilities and values are left to one pass afterwards.

    Args:
        environments: They go on from where they are.
        policy: Its weights do not change meanwhile.
        normalization: Frozen statistics.
        num_steps: T, of each environment.
        generator: Of the noise, on the CPU.
        memory: Of a policy that has one; it goes on from there. None for a blank one.

    Raises:
        NumericsError: A reward or an observation is NaN or infinite.
        EnvError: No step was one in which an action was taken.
    """
    spaces, num_envs = environments.spaces, environments.num_envs
    record = Record.empty(num_steps, num_envs)
    seen = observation_buffer(spaces, num_steps, num_envs)
    kind = np.float32 if policy.head.is_continuous else np.int64
    actions = np.zeros((num_steps, num_envs, spaces.action_size), kind)
    starts = environments.starts.copy()
    noise = policy.draw_noise(num_steps, num_envs, generator).numpy()
    memory = memory or Memory(policy, num_envs)
    memories = None if policy.memory is None else MemoryRecord.empty(num_steps, memory)
    memory.state = _act(environments, policy, normalization, noise, seen, actions, record, memory, memories).clone()
    _check_finite(environments, seen, record)
    final = sorted(record.final)
    cuts = np.stack([record.final[key] for key in final]) if final else observation_buffer(spaces, 0)
    tables = (record.rewards, record.terminated, record.truncated, record.valid, starts, cuts)
    rewards, terminated, truncated, valid, first, final_observations = map(torch.from_numpy, tables)
    return Steps(
        observations=torch.from_numpy(seen),
        actions=torch.from_numpy(actions),
        rewards=rewards,
        terminated=terminated,
        truncated=truncated,
        valid=valid,
        starts=first,
        final_observations=final_observations,
        final_steps=torch.tensor(final, dtype=torch.long).reshape(-1, 2),
        last_observations=torch.from_numpy(environments.observations.copy()),
        memories=memories and memories.complete(memory, final),
    )


def _check_finite(environments: Environments, seen: np.ndarray, record: Record) -> None:
    """Say what an environment did wrong before it shows as a loss that is not finite."""
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
            f"environment {environments.name!r} only began episodes in this rollout, which leaves nothing to learn "
            "from; set control.num_steps to at least 2"
        )


@torch.inference_mode()
def _act(
    environments: Environments,
    policy: ControlActorCritic,
    normalization: Normalization,
    noise: np.ndarray,
    seen: np.ndarray,
    actions: np.ndarray,
    record: Record,
    memory: Memory,
    memories: MemoryRecord | None,
) -> Tensor:
    """The loop over steps, which costs as little as possible besides the network and the environments."""
    act, choose, executed = acting_function(policy, environments.num_envs), policy.head.choose, policy.head.executed
    state, inputs = memory.after(environments.starts), None
    for step, perturbation in enumerate(noise):
        seen[step] = environments.observations
        inputs = normalization.normalize(environments.observations, out=inputs)
        if memories is not None:
            memories.before[step] = state
        outputs, state = act(inputs, state)
        actions[step] = choose(outputs + perturbation)
        environments.step(executed(actions[step]), step, record)
        if memories is not None:
            memories.note_cuts(step, state, record)
            state = blank_where(environments.starts, state)
    return state
