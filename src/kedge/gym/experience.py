"""The experience of a control task: every transition a row."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kedge.algorithm.gae import generalized_advantages
from kedge.gym.networks import ControlActorCritic
from kedge.gym.normalization import Normalization
from kedge.gym.rollout import Steps

__all__ = ["ControlExperience", "Pieces", "experience_of"]


@dataclass(frozen=True)
class ControlExperience:
    """Transitions with log probabilities, values, advantages and returns; see `training.learner.Batch`.

    Attributes:
        observations: As the policy reads them: normalized numbers [n, d] or images [n, …].
        actions: What it chose [n, components].
        parameters: Of the distributions that the actions were drawn from.
        action_mask: True.
        old_logprobs: Log probabilities at the start of the epochs, nats.
        values: The critic's values at the start of the epochs.
        advantages: Each action's weight in the policy loss.
        returns: The critic's targets.
        rewards: As the critic learns them.
        ref_logprobs: None: there is no reference policy.
        importance_weights: None: the sampler's probabilities are the trainer's.
        positive: None: nothing is imitated.
    """

    observations: Tensor
    actions: Tensor
    parameters: Float[Tensor, "n parameters"]
    action_mask: Bool[Tensor, "n 1"]
    old_logprobs: Float[Tensor, "n 1"]
    values: Float[Tensor, "n 1"]
    advantages: Float[Tensor, "n 1"]
    returns: Float[Tensor, "n 1"]
    rewards: Float[Tensor, "n 1"]
    ref_logprobs: None = None
    importance_weights: None = None
    positive: None = None

    @property
    def num_rows(self) -> int:
        """Transitions."""
        return len(self.actions)

    @property
    def row_lengths(self) -> list[int]:
        """Steps of each row."""
        return [1] * self.num_rows

    @property
    def reward_mask(self) -> Bool[Tensor, "n 1"]:
        """True: every action has a reward."""
        return self.action_mask

    def select(self, rows: Int[Tensor, " selected"] | slice) -> ControlExperience:
        """A subset of the rows, in the order of `rows`."""
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: each[rows] for name, each in tensors.items() if isinstance(each, Tensor)})

    def with_advantages(self, advantages: Float[Tensor, "n 1"]) -> ControlExperience:
        """The same with other advantages, such as whitened ones."""
        return replace(self, advantages=advantages)


@dataclass(frozen=True)
class Pieces:
    """The pieces of episodes in a rollout: each environment's steps, cut where an episode ends and at the last step.

    Attributes:
        steps: Step of each transition, by environment, then by time.
        envs: Its environment.
        rows: Its piece.
        columns: Its place in the piece.
        ends: The place of each piece's last transition in these tables.
    """

    steps: Int[Tensor, " n"]
    envs: Int[Tensor, " n"]
    rows: Int[Tensor, " n"]
    columns: Int[Tensor, " n"]
    ends: Int[Tensor, " pieces"]

    @classmethod
    def of(cls, steps: Steps) -> Pieces:
        """The pieces of a rollout. Steps in which no action was taken are in none."""
        valid = steps.valid.numpy().T
        ended = (steps.terminated | steps.truncated).numpy().T
        envs, times = np.nonzero(valid)
        begins = np.ones(len(times), np.bool_)
        begins[1:] = (envs[1:] != envs[:-1]) | ended[envs[:-1], times[:-1]]
        rows = np.cumsum(begins) - 1
        columns = np.arange(len(times)) - np.flatnonzero(begins)[rows]
        ends = np.append(np.flatnonzero(begins)[1:], len(times)) - 1
        return cls(*map(torch.from_numpy, (times, envs, rows, columns, ends)))

    def padded(self, numbers: Float[Tensor, " n"]) -> Float[Tensor, "pieces time"]:
        """A number of each transition as padded rows, 0 elsewhere."""
        table = numbers.new_zeros((len(self.ends), int(self.columns.max()) + 1))
        table[self.rows, self.columns] = numbers
        return table

    def flat(self, table: Float[Tensor, "pieces time"]) -> Float[Tensor, " n"]:
        """The reverse of `padded`."""
        return table[self.rows, self.columns]


@torch.no_grad()
def experience_of(
    steps: Steps,
    policy: ControlActorCritic,
    normalization: Normalization,
    *,
    gamma: float,
    gae_lambda: float,
    micro_batch: int | None = None,
) -> ControlExperience:
    """The experience of a rollout: one pass of policy and critic, then generalized advantage estimation.

    Each piece of an episode is a row of its own. Behind its last step comes: nothing (0) if the episode ended; the
    value of its final observation if it was cut off; the value of the next observation if the rollout ended.

    Args:
        steps: The rollout.
        policy: With the weights that sampled it.
        normalization: With the statistics that it was sampled with; those of rewards may be newer.
        gamma: Discount γ.
        gae_lambda: λ.
        micro_batch: Transitions of a forward pass; None for all.

    Source: Pardo et al. 2018 (arXiv 1712.00378), truncation; spec §6.25.
    """
    pieces = Pieces.of(steps)
    at = (pieces.steps, pieces.envs)
    observations = torch.from_numpy(normalization.normalize(steps.observations[at].numpy())).to(policy.device)
    actions = steps.actions[at].to(policy.device)
    logprobs, parameters, values = _pass(policy, observations, actions, micro_batch)
    rewards = torch.from_numpy(normalization.scale(steps.rewards[at].numpy()))
    out = generalized_advantages(
        pieces.padded(rewards),
        pieces.padded(values.cpu()),
        pieces.padded(torch.ones_like(rewards)).bool(),
        gamma=gamma,
        gae_lambda=gae_lambda,
        bootstrap_values=_values_behind(steps, pieces, policy, normalization),
    )
    columns = (logprobs, values, pieces.flat(out.advantages), pieces.flat(out.returns), rewards)
    table = (each.to(policy.device).unsqueeze(-1) for each in columns)
    old_logprobs, old_values, advantages, returns, scaled = table
    return ControlExperience(
        observations=observations,
        actions=actions,
        parameters=parameters,
        action_mask=torch.ones_like(old_values, dtype=torch.bool),
        old_logprobs=old_logprobs,
        values=old_values,
        advantages=advantages,
        returns=returns,
        rewards=scaled,
    )


def _pass(
    policy: ControlActorCritic, observations: Tensor, actions: Tensor, micro_batch: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Log probabilities, parameters and values of every transition."""
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    size = micro_batch or len(observations)
    for one, chosen in zip(observations.split(size), actions.split(size), strict=True):
        distribution, values = policy(one)
        parts.append((distribution.log_prob(chosen), distribution.parameters, values))
    logprobs, parameters, values = (torch.cat(each) for each in zip(*parts, strict=True))
    return logprobs, parameters, values


def _values_behind(
    steps: Steps, pieces: Pieces, policy: ControlActorCritic, normalization: Normalization
) -> Float[Tensor, " pieces"]:
    """The value of the state behind each piece."""

    def values(observations: Tensor) -> Tensor:
        read = torch.from_numpy(normalization.normalize(observations.numpy()))
        return policy.values(read.to(policy.device)).cpu()

    behind = torch.zeros(steps.valid.shape)
    behind[-1] = values(steps.last_observations)
    if len(steps.final_steps):
        behind[steps.final_steps[:, 0], steps.final_steps[:, 1]] = values(steps.final_observations)
    behind = torch.where(steps.terminated, 0.0, behind)
    return behind[pieces.steps[pieces.ends], pieces.envs[pieces.ends]]
