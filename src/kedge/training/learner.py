"""Between the PPO update and the models: what a learner offers, and the language model's implementation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from typing_extensions import Self

from kedge.algorithm.experience import Experience, PolicyOutputs, Rollout
from kedge.models import ActorCritic, budget_batches

__all__ = ["Batch", "LanguageLearner", "Learner"]


class Batch(Protocol):
    """What the update reads of its experience: rows of actions, padded. Language's is `Experience`."""

    @property
    def num_rows(self) -> int:
        """Rows that are shuffled into minibatches."""
        ...

    @property
    def action_mask(self) -> Bool[Tensor, "batch time"]:
        """True on actions."""
        ...

    @property
    def reward_mask(self) -> Bool[Tensor, "batch time"]:
        """True where values and returns count."""
        ...

    @property
    def old_logprobs(self) -> Float[Tensor, "batch time"]:
        """Log probabilities at the start of the epochs, nats."""
        ...

    @property
    def ref_logprobs(self) -> Float[Tensor, "batch time"] | None:
        """Log probabilities under a reference policy, nats."""
        ...

    @property
    def values(self) -> Float[Tensor, "batch time"] | None:
        """The critic's values at the start of the epochs."""
        ...

    @property
    def advantages(self) -> Float[Tensor, "batch time"]:
        """What the policy loss weighs each action by."""
        ...

    @property
    def returns(self) -> Float[Tensor, "batch time"]:
        """The critic's targets."""
        ...

    @property
    def importance_weights(self) -> Float[Tensor, "batch time"] | None:
        """Factor of each action's policy loss, or None."""
        ...

    def select(self, rows: Int[Tensor, " selected"] | slice) -> Self:
        """Some of the rows."""
        ...


B = TypeVar("B", bound=Batch)


class Learner(Protocol[B]):
    """A policy, with or without a critic, as the PPO update trains it."""

    @property
    def needs_values(self) -> bool:
        """Whether there is a critic to train."""
        ...

    def micro_batches(self, batch: B) -> Iterator[tuple[Int[Tensor, " rows"], B]]:
        """The batch in parts that fit into one forward and backward pass, each with its row numbers."""
        ...

    def evaluate(self, batch: B) -> PolicyOutputs:
        """Log probabilities, entropy and values of the batch's actions under the current weights, differentiable."""
        ...


@dataclass
class LanguageLearner:
    """A language model and its critic, evaluated on packed micro-batches.

    Until the first optimizer step, the weights are those that sampled. So where one forward pass holds all responses,
    that pass also gives the old log probabilities and values: `first_pass` runs it before the experience is collected,
    and `evaluate` returns it for the first minibatch instead of running it again.

    Args:
        actor_critic: Policy and critic.
        temperature: The sampling temperature; divides the logits.
        precision: Number format of the matrix products.
        micro_batch_tokens: Tokens per forward and backward pass; None takes a whole minibatch.
        entropy_gradient: Keep the entropy differentiable: an entropy bonus is paid.
        value_after_last: Also evaluate the state after the last action.
    """

    actor_critic: ActorCritic
    temperature: float
    precision: Literal["fp32", "bf16"] = "fp32"
    micro_batch_tokens: int | None = None
    entropy_gradient: bool = False
    value_after_last: bool = False
    _first_pass: PolicyOutputs | None = None

    @property
    def needs_values(self) -> bool:
        """See `Learner`."""
        return self.actor_critic.has_critic

    def first_pass(self, rollout: Rollout) -> PolicyOutputs | None:
        """Run the first minibatch's forward pass now, if one pass holds all rows; None if it does not.

        Only for an update whose epochs have one minibatch, and whose policy is trained.
        """
        if self.micro_batch_tokens is None or rollout.num_tokens <= self.micro_batch_tokens:
            self._first_pass = self._forward(rollout)
        return self._first_pass

    def micro_batches(self, batch: Experience) -> Iterator[tuple[Int[Tensor, " rows"], Experience]]:
        """See `Learner`. Rows of similar length share a pass."""
        if self._first_pass is not None:
            yield torch.arange(batch.num_rows), batch
            return
        for numbers in budget_batches(batch.rollout.row_lengths, self.micro_batch_tokens):
            rows = torch.tensor(numbers, device=batch.scores.device)
            yield rows, batch.select(rows)

    def evaluate(self, batch: Experience) -> PolicyOutputs:
        """See `Learner`."""
        outputs, self._first_pass = self._first_pass, None
        return self._forward(batch.rollout) if outputs is None else outputs

    @contextmanager
    def frozen_policy(self) -> Iterator[None]:
        """Inside, only the critic gets gradients: its warm-up."""
        frozen = [each for each in self.actor_critic.policy_parameters() if each.requires_grad]
        for parameter in frozen:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(True)

    def _forward(self, rollout: Rollout) -> PolicyOutputs:
        return self.actor_critic(
            rollout,
            temperature=self.temperature,
            precision=self.precision,
            entropy_gradient=self.entropy_gradient,
            value_after_last=self.value_after_last,
        )
