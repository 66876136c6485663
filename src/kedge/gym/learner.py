"""The PPO update's view of a control policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kedge.algorithm.experience import CriticOutputs, PolicyOutputs
from kedge.gym.experience import ControlExperience
from kedge.gym.networks import ControlActorCritic
from kedge.system.ranks import ALONE, PassTokens, Ranks, tokens_of, within_memory

__all__ = ["ControlLearner"]

T = TypeVar("T")


@dataclass
class ControlLearner:
    """A control policy and its critic; see `training.learner.Learner`.

    Args:
        policy: Policy and critic.
        micro_batch: Transitions of a forward and backward pass; None for a whole minibatch.
        ranks: The processes that share the passes.
    """

    policy: ControlActorCritic
    micro_batch: PassTokens = None
    ranks: Ranks = ALONE

    @property
    def needs_values(self) -> bool:
        """See `Learner`."""
        return True

    def micro_batches(self, batch: ControlExperience) -> Iterator[tuple[Int[Tensor, " rows"], ControlExperience]]:
        """See `Learner`."""
        most = tokens_of(self.micro_batch)
        if not self.ranks.are_several and (most is None or batch.action_mask.numel() <= most):
            yield torch.arange(batch.num_rows), batch
            return
        for part in self.ranks.plan(batch.row_lengths, most):
            rows = torch.tensor(part.rows)
            yield rows if part.counts else rows[:0], batch.select(rows)

    def evaluate(self, batch: ControlExperience) -> PolicyOutputs:
        """See `Learner`; the KL from the old distribution is exact."""
        distribution, values = self.policy(batch.observations, batch.memory)
        return PolicyOutputs(
            logprobs=_table(distribution.log_prob(batch.actions.flatten(0, -2)), batch),
            entropy=_table(distribution.entropy(), batch),
            values=_table(values, batch),
            kl=_table(distribution.kl(batch.parameters.flatten(0, -2)), batch),
        )

    def repeated(self, batch: ControlExperience, attempt: Callable[[], T]) -> T:
        """The result of all passes over a batch; see `within_memory`."""
        return within_memory(self.micro_batch, batch.row_lengths, attempt, ranks=self.ranks)

    def evaluate_critic(self, batch: ControlExperience) -> CriticOutputs:
        """See `Learner`."""
        return CriticOutputs(values=_table(self.policy.values(batch.observations, batch.memory, alone=True), batch))


def _table(numbers: Float[Tensor, " n"], batch: ControlExperience) -> Float[Tensor, "rows time"]:
    """A number of each step as rows; 0 on padding, which only sequences have."""
    table = numbers.view(batch.action_mask.shape)
    return table if batch.memory is None else torch.where(batch.action_mask, table, 0.0)
