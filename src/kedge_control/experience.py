"""The experience of a control task, with a row per transition or short sequence, and its learner."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kedge.algorithm.advantages import generalized_advantages
from kedge.algorithm.experience import CriticOutputs, PolicyOutputs
from kedge.ranks import ALONE, PassTokens, Ranks, tokens_of, within_memory
from kedge_control.networks import ControlActorCritic
from kedge_control.normalization import Normalization
from kedge_control.spaces import Array
from kedge_control.steps import Steps

T = TypeVar("T")

SEQUENCE_LENGTH = 32
"""With a memory, the number of steps of an episode that are trained on at once and through which gradients flow."""


@dataclass(frozen=True)
class ControlExperience:
    """Transitions with log probabilities, values, advantages and returns; see `training.learner.Batch`.

    A row is one transition (time = 1). For a policy with a memory it is a sequence of transitions of one episode,
    padded on the right, where the mask is False; observations, actions and parameters then also have a time axis.

    Attributes:
        observations: The policy's inputs: normalized numbers [n, d] or images [n, …].
        actions: The policy's choices [n, components].
        parameters: Parameters of the distributions from which the actions were drawn.
        action_mask: True on transitions.
        old_logprobs: Log probabilities at the start of the epochs, nats.
        values: The critic's values at the start of the epochs.
        advantages: Each action's weight in the policy loss.
        returns: The critic's targets.
        ref_logprobs: Always None: control has no reference policy.
        importance_weights: None: the sampler's probabilities are the trainer's.
        positive: Always None: nothing is imitated.
        memory: At the start of each row; None without a memory.
    """

    observations: Tensor
    actions: Tensor
    parameters: Tensor
    action_mask: Bool[Tensor, "n time"]
    old_logprobs: Float[Tensor, "n time"]
    values: Float[Tensor, "n time"]
    advantages: Float[Tensor, "n time"]
    returns: Float[Tensor, "n time"]
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
        """The action mask, since every action has a reward."""
        return self.action_mask

    def select(self, rows: Int[Tensor, " selected"] | slice) -> ControlExperience:
        """Select rows, in the order of `rows`."""
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: each[rows] for name, each in tensors.items() if isinstance(each, Tensor)})

    def with_advantages(self, advantages: Float[Tensor, "n time"]) -> ControlExperience:
        """Return the experience with other advantages, such as whitened ones."""
        return replace(self, advantages=advantages)


@dataclass(frozen=True)
class _Pieces:
    """The pieces of episodes in a rollout: each environment's steps, split where an episode ends.

    Attributes:
        at: Step and environment of each transition, by environment, then by time.
        rows: Its piece.
        columns: Its place in the piece.
        ends: The place of each piece's last transition in these tables.
    """

    at: tuple[Int[Array, " n"], Int[Array, " n"]]
    rows: Int[Tensor, " n"]
    columns: Int[Tensor, " n"]
    ends: Int[Tensor, " pieces"]

    @classmethod
    def of(cls, steps: Steps, longest: int | None = None) -> _Pieces:
        """Split a rollout into pieces of at most `longest` steps. Steps without an action are left out."""
        ended = (steps.terminated | steps.truncated).T
        envs, times = np.nonzero(steps.valid.T)
        begins = np.ones(len(times), np.bool_)
        begins[1:] = (envs[1:] != envs[:-1]) | ended[envs[:-1], times[:-1]]
        if longest is not None:
            first = np.flatnonzero(begins)[np.cumsum(begins) - 1]
            begins |= (np.arange(len(times)) - first) % longest == 0
        rows = np.cumsum(begins) - 1
        columns = np.arange(len(times)) - np.flatnonzero(begins)[rows]
        ends = np.append(np.flatnonzero(begins)[1:], len(times)) - 1
        return cls((times, envs), *map(torch.from_numpy, (rows, columns, ends)))

    def padded(self, numbers: Tensor) -> Tensor:
        """Arrange a table of transitions [n, …] as padded rows [pieces, time, …], 0 elsewhere."""
        table = numbers.new_zeros((len(self.ends), int(self.columns.max()) + 1, *numbers.shape[1:]))
        table[self.rows, self.columns] = numbers
        return table

    def flat(self, table: Tensor) -> Tensor:
        """Reverse `padded`."""
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
) -> ControlExperience:
    """Compute the experience of a rollout: one pass of policy and critic, then generalized advantage estimation.

    Each piece of an episode is a separate row. The value after its last step is 0 if the episode ended, the value of
    its final observation if it was truncated, or the value of the next observation if the rollout stopped there.

    Args:
        steps: The rollout.
        policy: The policy, with the weights that sampled the rollout.
        normalization: The normalization, with the observation statistics used during sampling; its reward statistics
            may be newer.
        gamma: Discount γ.
        gae_lambda: λ.
        micro_batch: Transitions per forward pass; None for all at once.

    Source: Pardo et al. 2018 (arXiv 1712.00378), truncation; spec §6.25.
    """
    pieces = _Pieces.of(steps)
    played = _played(steps, policy, normalization)
    lengths = played.row_lengths
    played = within_memory(micro_batch, lengths, lambda: _with_pass(played, policy, tokens_of(micro_batch)))
    rewards = torch.from_numpy(normalization.scale(steps.rewards[pieces.at]))
    # Rows are ordered by environment, then by time, like the pieces: masked tables are flat ones.
    out = generalized_advantages(
        pieces.padded(rewards),
        pieces.padded(played.values[played.action_mask].cpu()),
        pieces.padded(torch.ones_like(rewards)).bool(),
        gamma=gamma,
        gae_lambda=gae_lambda,
        bootstrap_values=_values_after(steps, pieces, policy, normalization),
    )
    advantages, returns = (torch.zeros_like(played.values) for _ in range(2))
    advantages[played.action_mask] = pieces.flat(out.advantages).to(policy.device)
    returns[played.action_mask] = pieces.flat(out.returns).to(policy.device)
    return replace(played, advantages=advantages, returns=returns)


def _played(steps: Steps, policy: ControlActorCritic, normalization: Normalization) -> ControlExperience:
    """Make the rows of a rollout with observations and actions; the other fields are empty."""
    pieces = _Pieces.of(steps, None if steps.memories is None else SEQUENCE_LENGTH)
    seen = torch.from_numpy(normalization.normalize(steps.observations[pieces.at])).to(policy.device)
    actions = torch.from_numpy(steps.actions[pieces.at]).to(policy.device)
    mask = torch.ones(len(actions), 1, dtype=torch.bool, device=policy.device)
    memory = None
    if steps.memories is not None:
        first = pieces.columns == 0
        memory = steps.memories.before[pieces.at][first]
        seen = pieces.padded(seen)
        actions = pieces.padded(actions)
        mask = pieces.padded(mask[:, 0])
    empty = torch.zeros(mask.shape, device=policy.device)
    return ControlExperience(seen, actions, empty, mask, empty, empty, empty, empty, memory=memory)


def _with_pass(played: ControlExperience, policy: ControlActorCritic, micro_batch: int | None) -> ControlExperience:
    """Add log probabilities, parameters and values, with 0 on padding."""
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    longest = played.action_mask.shape[1]
    rows = played.num_rows if micro_batch is None else max(1, micro_batch // longest)
    for first in range(0, played.num_rows, rows):
        part = played.select(slice(first, first + rows))
        distribution, values = policy(part.observations, part.memory)
        parameters = distribution.parameters
        if part.memory is not None:
            parameters = parameters.unflatten(0, part.action_mask.shape)
        logprobs = distribution.log_prob(part.actions.flatten(0, -2))
        parts.append((parameters, _table(logprobs, part), _table(values, part)))
    parameters, logprobs, values = (torch.cat(each) for each in zip(*parts, strict=True))
    return replace(played, parameters=parameters, old_logprobs=logprobs, values=values)


def _values_after(
    steps: Steps, pieces: _Pieces, policy: ControlActorCritic, normalization: Normalization
) -> Float[Tensor, " pieces"]:
    """Compute the value of the state after each piece."""
    memories = steps.memories

    def values(observations: Array, memory: Tensor | None) -> Tensor:
        read = torch.from_numpy(normalization.normalize(observations)).to(policy.device)
        # For a policy with a memory, each observation is a sequence of one step.
        return policy.values(read if memory is None else read.unsqueeze(1), memory).cpu()

    after = torch.zeros(steps.valid.shape)
    after[-1] = values(steps.last_observations, memories and memories.last)
    if len(steps.final_steps):
        cuts = values(steps.final_observations, memories and memories.final)
        after[tuple(steps.final_steps.T)] = cuts
    after[steps.terminated] = 0.0
    return after[pieces.at][pieces.ends]


@dataclass
class ControlLearner:
    """A control policy and its critic; see `training.learner.Learner`.

    Args:
        policy: Policy and critic.
        micro_batch: Transitions of a forward and backward pass; None for a whole minibatch.
        trains_kl: The loss contains the KL, which is otherwise measured without a gradient.
        ranks: The single process.
    """

    policy: ControlActorCritic
    micro_batch: PassTokens = None
    trains_kl: bool = True
    ranks: Ranks = ALONE

    @property
    def needs_values(self) -> bool:
        """See `Learner`."""
        return True

    def has_first_pass(self, batch: ControlExperience) -> bool:
        """See `Learner`."""
        return False

    def micro_batches(self, batch: ControlExperience) -> Iterator[tuple[Int[Tensor, " rows"], ControlExperience]]:
        """See `Learner`."""
        most = tokens_of(self.micro_batch)
        if most is None or batch.action_mask.numel() <= most:
            yield torch.arange(batch.num_rows), batch
            return
        for part in self.ranks.plan(batch.row_lengths, most):
            rows = torch.tensor(part.rows)
            yield rows, batch.select(rows)

    def evaluate(self, batch: ControlExperience) -> PolicyOutputs:
        """See `Learner`; the KL from the old distribution is exact."""
        distribution, values = self.policy(batch.observations, batch.memory)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.trains_kl):
            kl = distribution.kl_from(self.policy.head.restored(batch.parameters.flatten(0, -2)))
        return PolicyOutputs(
            logprobs=_table(distribution.log_prob(batch.actions.flatten(0, -2)), batch),
            entropy=_table(distribution.entropy(), batch),
            values=_table(values, batch),
            kl=_table(kl, batch),
        )

    def evaluate_critic(self, batch: ControlExperience) -> CriticOutputs:
        """See `Learner`."""
        return CriticOutputs(values=_table(self.policy.values(batch.observations, batch.memory, alone=True), batch))

    def repeated(self, batch: ControlExperience, attempt: Callable[[], T]) -> T:
        """See `Learner` and `within_memory`."""
        return within_memory(self.micro_batch, batch.row_lengths, attempt, ranks=self.ranks)


def _table(numbers: Float[Tensor, " n"], batch: ControlExperience) -> Float[Tensor, "rows time"]:
    """Arrange one number per step as rows, with 0 on padding, which only sequences have."""
    table = numbers.view(batch.action_mask.shape)
    return table if batch.memory is None else torch.where(batch.action_mask, table, 0.0)
