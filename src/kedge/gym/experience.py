"""The experience of a control task: every transition a row, or with a memory, every short sequence of them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kedge.algorithm.advantages import generalized_advantages
from kedge.gym.networks import ControlActorCritic
from kedge.gym.normalization import Normalization
from kedge.gym.rollout import Steps
from kedge.system.ranks import PassTokens, tokens_of, within_memory

__all__ = ["ControlExperience", "Pieces", "experience_of"]


@dataclass(frozen=True)
class ControlExperience:
    """Transitions with log probabilities, values, advantages and returns; see `training.learner.Batch`.

    A row is one transition (time = 1). For a policy with a memory it is a sequence of transitions of one episode,
    padded on the right, where the mask is False; observations, actions and parameters then have an axis of time, too.

    Attributes:
        observations: As the policy reads them: normalized numbers [n, d] or images [n, …].
        actions: What it chose [n, components].
        parameters: Of the distributions that the actions were drawn from.
        action_mask: True on transitions.
        old_logprobs: Log probabilities at the start of the epochs, nats.
        values: The critic's values at the start of the epochs.
        advantages: Each action's weight in the policy loss.
        returns: The critic's targets.
        rewards: As the critic learns them.
        ref_logprobs: None: there is no reference policy.
        importance_weights: None: the sampler's probabilities are the trainer's.
        positive: None: nothing is imitated.
        memory: What the policy remembered at the beginning of each row; None without a memory.
    """

    observations: Tensor
    actions: Tensor
    parameters: Tensor
    action_mask: Bool[Tensor, "n time"]
    old_logprobs: Float[Tensor, "n time"]
    values: Float[Tensor, "n time"]
    advantages: Float[Tensor, "n time"]
    returns: Float[Tensor, "n time"]
    rewards: Float[Tensor, "n time"]
    ref_logprobs: None = None
    importance_weights: None = None
    positive: None = None
    memory: Float[Tensor, "n 2 units"] | None = None

    @property
    def num_rows(self) -> int:
        """Transitions, or sequences."""
        return len(self.actions)

    @property
    def row_lengths(self) -> list[int]:
        """Steps of each row."""
        return self.action_mask.sum(-1).tolist()

    @property
    def reward_mask(self) -> Bool[Tensor, "n 1"]:
        """The same: every action has a reward."""
        return self.action_mask

    def select(self, rows: Int[Tensor, " selected"] | slice) -> ControlExperience:
        """A subset of the rows, in the order of `rows`."""
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: each[rows] for name, each in tensors.items() if isinstance(each, Tensor)})

    def with_advantages(self, advantages: Float[Tensor, "n time"]) -> ControlExperience:
        """The same with other advantages, such as whitened ones."""
        return replace(self, advantages=advantages)


@dataclass(frozen=True)
class Pieces:
    """The pieces of episodes in a rollout: each environment's steps, cut where an episode ends and at the last step.

    For rows that are sequences they are cut further.

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
    def of(cls, steps: Steps, longest: int | None = None) -> Pieces:
        """The pieces of a rollout, of at most `longest` steps. Steps in which no action was taken are in none."""
        valid = steps.valid.numpy().T
        ended = (steps.terminated | steps.truncated).numpy().T
        envs, times = np.nonzero(valid)
        begins = np.ones(len(times), np.bool_)
        begins[1:] = (envs[1:] != envs[:-1]) | ended[envs[:-1], times[:-1]]
        if longest is not None:
            first = np.flatnonzero(begins)[np.cumsum(begins) - 1]
            begins |= (np.arange(len(times)) - first) % longest == 0
        rows = np.cumsum(begins) - 1
        columns = np.arange(len(times)) - np.flatnonzero(begins)[rows]
        ends = np.append(np.flatnonzero(begins)[1:], len(times)) - 1
        return cls(*map(torch.from_numpy, (times, envs, rows, columns, ends)))

    def padded(self, numbers: Tensor) -> Tensor:
        """What each transition has [n, …] as padded rows [pieces, time, …], 0 elsewhere."""
        table = numbers.new_zeros((len(self.ends), int(self.columns.max()) + 1, *numbers.shape[1:]))
        table[self.rows, self.columns] = numbers
        return table

    def flat(self, table: Tensor) -> Tensor:
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
    micro_batch: PassTokens = None,
    sequence_length: int = 32,
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
        sequence_length: Longest row, for a policy with a memory: gradients reach so many steps back.

    Source: Pardo et al. 2018 (arXiv 1712.00378), truncation; spec §6.25.
    """
    pieces = Pieces.of(steps)
    at = (pieces.steps, pieces.envs)
    played = _Played.of(steps, policy, normalization, sequence_length)
    lengths = played.mask.sum(-1).tolist()
    logprobs, parameters, values = within_memory(
        micro_batch, lengths, lambda: _pass(policy, played, tokens_of(micro_batch))
    )
    rewards = torch.from_numpy(normalization.scale(steps.rewards[at].numpy()))
    out = generalized_advantages(
        pieces.padded(rewards),
        pieces.padded(played.flat(values).cpu()),
        pieces.padded(torch.ones_like(rewards)).bool(),
        gamma=gamma,
        gae_lambda=gae_lambda,
        bootstrap_values=_values_behind(steps, pieces, policy, normalization),
    )
    advantages, returns, scaled = (
        played.table(each).to(policy.device)
        for each in (pieces.flat(out.advantages), pieces.flat(out.returns), rewards)
    )
    return ControlExperience(
        observations=played.observations,
        actions=played.actions,
        parameters=parameters,
        action_mask=played.mask,
        old_logprobs=torch.where(played.mask, logprobs, 0.0),
        values=torch.where(played.mask, values, 0.0),
        advantages=advantages,
        returns=returns,
        rewards=scaled,
        memory=played.memory,
    )


@dataclass(frozen=True)
class _Played:
    """The rows of a rollout: what was seen and done, and what was remembered at the beginning of each."""

    observations: Tensor
    actions: Tensor
    mask: Bool[Tensor, "n time"]
    memory: Float[Tensor, "n 2 units"] | None
    sequences: Pieces | None

    @classmethod
    def of(cls, steps: Steps, policy: ControlActorCritic, normalization: Normalization, longest: int) -> _Played:
        pieces = Pieces.of(steps, None if steps.memories is None else longest)
        at = (pieces.steps, pieces.envs)
        seen = torch.from_numpy(normalization.normalize(steps.observations[at].numpy())).to(policy.device)
        done = steps.actions[at].to(policy.device)
        if steps.memories is None:
            return cls(seen, done, torch.ones(len(done), 1, dtype=torch.bool, device=policy.device), None, None)
        first = pieces.columns == 0
        memory = steps.memories.before[pieces.steps[first], pieces.envs[first]]
        mask = pieces.padded(torch.ones(len(done), dtype=torch.bool)).to(policy.device)
        return cls(pieces.padded(seen), pieces.padded(done), mask, memory, pieces)

    def table(self, numbers: Float[Tensor, " n"]) -> Float[Tensor, "n time"]:
        """A number of each transition as rows."""
        return numbers.unsqueeze(-1) if self.sequences is None else self.sequences.padded(numbers)

    def flat(self, table: Float[Tensor, "n time"]) -> Float[Tensor, " n"]:
        """The reverse of `table`."""
        return table.squeeze(-1) if self.sequences is None else self.sequences.flat(table)


def _pass(
    policy: ControlActorCritic, played: _Played, micro_batch: int | None
) -> tuple[Float[Tensor, "n time"], Tensor, Float[Tensor, "n time"]]:
    """Log probabilities, parameters and values of every row."""
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    rows = len(played.mask) if micro_batch is None else max(1, micro_batch // played.mask.shape[1])
    for first in range(0, len(played.mask), rows):
        part = slice(first, first + rows)
        shape, memory = played.mask[part].shape, played.memory
        distribution, values = policy(played.observations[part], None if memory is None else memory[part])
        logprobs = distribution.log_prob(played.actions[part].flatten(0, -2))
        parameters = distribution.parameters
        parameters = parameters if memory is None else parameters.unflatten(0, shape)
        parts.append((logprobs.view(shape), parameters, values.view(shape)))
    logprobs, parameters, values = (torch.cat(each) for each in zip(*parts, strict=True))
    return logprobs, parameters, values


def _values_behind(
    steps: Steps, pieces: Pieces, policy: ControlActorCritic, normalization: Normalization
) -> Float[Tensor, " pieces"]:
    """The value of the state behind each piece."""
    memories = steps.memories

    def values(observations: Tensor, memory: Tensor | None) -> Tensor:
        read = torch.from_numpy(normalization.normalize(observations.numpy())).to(policy.device)
        # To a policy with a memory, each observation is a sequence of one step.
        return policy.values(read if memory is None else read.unsqueeze(1), memory).cpu()

    behind = torch.zeros(steps.valid.shape)
    behind[-1] = values(steps.last_observations, memories and memories.last)
    if len(steps.final_steps):
        cuts = values(steps.final_observations, memories and memories.final)
        behind[steps.final_steps[:, 0], steps.final_steps[:, 1]] = cuts
    behind = torch.where(steps.terminated, 0.0, behind)
    return behind[pieces.steps[pieces.ends], pieces.envs[pieces.ends]]
