"""The interface between the PPO update and the models, and its implementation for language models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from typing_extensions import Self

from kedge.algorithm.experience import CriticOutputs, Experience, PolicyOutputs, Rollout
from kedge.models import ActorCritic, Precision
from kedge.ranks import ALONE, AdaptiveTokens, Part, PassTokens, Ranks, tokens_of, within_memory
from kedge.training.optimizer_kinds import Optimizer
from kedge.training.pass_trial import find_tokens


class Batch(Protocol):
    """The experience of an update: padded rows of actions. For language models it is `Experience`."""

    @property
    def action_mask(self) -> Bool[Tensor, "batch time"]:
        """True on actions."""
        ...

    @property
    def reward_mask(self) -> Bool[Tensor, "batch time"]:
        """True on slots with values and returns."""
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
        """Each action's weight in the policy loss."""
        ...

    @property
    def returns(self) -> Float[Tensor, "batch time"]:
        """The critic's targets."""
        ...

    @property
    def importance_weights(self) -> Float[Tensor, "batch time"] | None:
        """Factor of each action's policy loss; None for no correction."""
        ...

    @property
    def positive(self) -> Bool[Tensor, " batch"] | None:
        """True if a row is an example to imitate; None for no imitation."""
        ...

    def select(self, rows: Int[Tensor, " selected"] | slice) -> Self:
        """Select rows."""
        ...

    def with_advantages(self, advantages: Float[Tensor, "batch time"]) -> Self:
        """Return the rows with other advantages."""
        ...


B = TypeVar("B", bound=Batch)
T = TypeVar("T")


class Learner(Protocol[B]):
    """A policy, with or without a critic, for the PPO update to train."""

    @property
    def needs_values(self) -> bool:
        """True if there is a critic to train."""
        ...

    @property
    def ranks(self) -> Ranks:
        """The processes that share the passes over a batch; each has the full batch."""
        ...

    def has_first_pass(self, batch: B) -> bool:
        """True if `evaluate` has the outputs of exactly these rows already, with their gradients."""
        ...

    def micro_batches(self, batch: B) -> Iterable[tuple[Int[Tensor, " rows"], B]]:
        """Split this rank's share of the batch into parts that fit into one forward and backward pass.

        Each comes with its row numbers, which are empty for a part that is evaluated without effect; see `Part`.
        """
        ...

    def evaluate(self, batch: B) -> PolicyOutputs:
        """Log probabilities, entropy and values of the actions under the current weights, differentiable."""
        ...

    def evaluate_critic(self, batch: B) -> CriticOutputs:
        """Only the values, differentiable with respect to the parameters that only the critic has."""
        ...

    def repeated(self, batch: B, attempt: Callable[[], T]) -> T:
        """Run all passes over a batch, repeating them with smaller parts if memory runs out."""
        ...


Parts = list[tuple[Int[Tensor, " rows"], Experience]]
"""The micro-batches of a minibatch, each with the numbers of its rows."""


@dataclass
class LanguageLearner:
    """A language model and its critic, evaluated on packed micro-batches.

    Until the first optimizer step, the weights are still those used for sampling. So if a whole epoch is one forward
    pass, that pass also gives the old log probabilities and values: `first_pass` runs it before the experience is
    collected, and `evaluate` returns it for the first minibatch.

    Args:
        actor_critic: Policy and critic.
        temperature: The sampling temperature; divides the logits.
        precision: Number format of the matrix products.
        micro_batch_tokens: Tokens per forward and backward pass; None for a whole minibatch.
        entropy_gradient: Keep the entropy differentiable, for an entropy bonus.
        value_after_last: Also evaluate the state after the last action.
        one_minibatch: Epochs have a single minibatch, and the policy is trained: `first_pass` may be used.
        choose: Chooses the rows that the first step trains on, among a number of rows; None for all.
        ranks: The processes that share the passes.
    """

    actor_critic: ActorCritic
    temperature: float
    precision: Precision = "fp32"
    micro_batch_tokens: PassTokens = None
    entropy_gradient: bool = False
    value_after_last: bool = False
    one_minibatch: bool = False
    choose: Callable[[int], Int[Tensor, " rows"]] | None = None
    ranks: Ranks = ALONE
    needs_values: bool = field(init=False)
    reused_first_pass: bool = field(default=False, init=False)
    _pending: tuple[Rollout, PolicyOutputs] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        # A critic starts or stops being trained between updates only, and each update has its own learner.
        self.needs_values = self.actor_critic.trains_critic

    def find_tokens(self, rollout: Rollout, optimizer: Optimizer) -> None:
        """Find how many tokens a pass over such responses can hold, if that is not known; see `pass_trial`."""

        def run_pass(rows: list[int]) -> None:
            outputs = self._forward(rollout.select(torch.tensor(rows, device=rollout.response_ids.device)))
            tables = (outputs.logprobs, outputs.entropy, outputs.values)
            torch.stack([each.sum() for each in tables if each is not None and each.requires_grad]).sum().backward()

        prompts = rollout.shared_prompts(self.actor_critic.shares_up_to)
        lengths = rollout.row_lengths
        find_tokens(self.micro_batch_tokens, lengths, run_pass, optimizer, prompts=prompts, ranks=self.ranks)

    def first_pass(self, rollout: Rollout) -> PolicyOutputs | None:
        """Run the first minibatch's forward pass now if one pass holds all rows of an epoch, else return None.

        Rows that the step does not train on are evaluated without gradients. With several ranks it returns None: each
        rank's pass only covers its share, but experience needs all rows.
        """
        if not self.one_minibatch or self.ranks.are_several:
            return None

        def forward() -> tuple[Rollout, PolicyOutputs, PolicyOutputs] | None:
            if len(self._plan(rollout)) > 1:
                return None
            chosen = torch.ones_like(rollout.stopped)
            if self.choose is not None:
                chosen[:] = False
                chosen[self.choose(len(chosen))] = True
            if chosen.all():
                outputs = self._forward(rollout, values=True)
                return rollout, outputs, outputs
            trained, rest = (rollout.select(rows.nonzero().squeeze(-1)) for rows in (chosen, ~chosen))
            outputs = self._forward(trained, values=True)
            with torch.no_grad():
                return trained, outputs, _merged(chosen, outputs, self._forward(rest, values=True))

        found = self._within_memory(rollout, forward)
        if found is None:
            return None
        trained, kept, outputs = found
        self._pending = (trained, kept)
        return outputs

    def micro_batches(self, batch: Experience) -> Parts:
        """See `Learner`. Rows of similar length are grouped."""
        if self.has_first_pass(batch):
            return [(torch.arange(len(batch.scores)), batch)]
        self._pending = None  # it holds other rows than the batch, from which some were masked
        parts: Parts = []
        for part in self._plan(batch.rollout):
            rows = torch.tensor(part.rows, device=batch.scores.device)
            parts.append((rows if part.counts else rows[:0], batch.select(rows)))
        return parts

    def evaluate(self, batch: Experience) -> PolicyOutputs:
        """See `Learner`."""
        if self._pending is not None and self.has_first_pass(batch):
            (_, outputs), self._pending = self._pending, None
            self.reused_first_pass = True
            return outputs if self.needs_values else replace(outputs, values=None)
        return self._forward(batch.rollout)

    def repeated(self, batch: Experience, attempt: Callable[[], T]) -> T:
        """See `Learner` and `within_memory`."""
        tokens = tokens_of(self.micro_batch_tokens) if self._pending else None
        found = self._within_memory(batch.rollout, attempt)
        if tokens and tokens != tokens_of(self.micro_batch_tokens):  # repeated in smaller passes
            self.reused_first_pass = False
        return found

    def evaluate_critic(self, batch: Experience) -> CriticOutputs:
        """See `Learner`."""
        return self.actor_critic.critic_outputs(
            batch.rollout, precision=self.precision, value_after_last=self.value_after_last
        )

    def value_states(self, batch: Experience) -> Float[Tensor, "slots dim"]:
        """The states that the critic's head reads."""
        return self.actor_critic.value_states(
            batch.rollout, precision=self.precision, value_after_last=self.value_after_last
        )

    @contextmanager
    def frozen_policy(self) -> Iterator[None]:
        """Context in which only the critic receives gradients, for its warm-up."""
        frozen = [each for each in self.actor_critic.policy_parameters() if each.requires_grad]
        for parameter in frozen:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(True)

    def has_first_pass(self, batch: Experience) -> bool:
        """See `Learner`."""
        if self._pending is None:
            return False
        names = ("prompt_ids", "response_ids", "action_mask")
        pairs = ((getattr(self._pending[0], name), getattr(batch.rollout, name)) for name in names)
        return all(torch.equal(one, other) for one, other in pairs)

    def _plan(self, rollout: Rollout) -> list[Part]:
        prompts = rollout.shared_prompts(self.actor_critic.shares_up_to)
        return self.ranks.plan(rollout.row_lengths, self.micro_batch_tokens, prompts)

    def _within_memory(self, rollout: Rollout, attempt: Callable[[], T]) -> T:
        budget = self.micro_batch_tokens
        if not isinstance(budget, AdaptiveTokens):
            return attempt()
        prompts = rollout.shared_prompts(self.actor_critic.shares_up_to)
        return within_memory(budget, rollout.row_lengths, attempt, prompts=prompts, ranks=self.ranks)

    def _forward(self, rollout: Rollout, *, values: bool = False) -> PolicyOutputs:
        return self.actor_critic(
            rollout,
            temperature=self.temperature,
            precision=self.precision,
            entropy_gradient=self.entropy_gradient,
            value_after_last=self.value_after_last,
            values=values or self.needs_values,
        )


def _merged(chosen: Bool[Tensor, " batch"], outputs: PolicyOutputs, others: PolicyOutputs) -> PolicyOutputs:
    """Put the log probabilities and values of the chosen rows and of the others in the order of the batch."""

    def table(one: Tensor, other: Tensor) -> Tensor:
        found = one.new_empty(len(chosen), *one.shape[1:])
        found[chosen], found[~chosen] = one.detach(), other
        return found

    values = None if outputs.values is None or others.values is None else table(outputs.values, others.values)
    return PolicyOutputs(
        table(outputs.logprobs, others.logprobs), table(outputs.entropy.detach(), others.entropy), values
    )
