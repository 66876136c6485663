"""The forward pass over prompts and responses, shared by experience collection and training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from kedge.algorithm.experience import CriticOutputs, PolicyOutputs, Rollout
from kedge.algorithm.logprobs import token_logprobs_and_entropy
from kedge.models.heads import ValueHead, Values, scale_head
from kedge.models.language import LanguageModel
from kedge.models.packing.rows import TokenRows
from kedge.models.precision import Precision, autocast
from kedge.models.scalar import ScalarModel

__all__ = ["ActorCritic", "ValueGradient", "response_logprobs"]

ValueGradient = Literal["trunk", "head"]

ROUNDING = 1e-6
"""Numbers whose spread is a smaller share of their size are equal."""


@dataclass(frozen=True)
class _Reading:
    """The tokens that a forward pass reads, and the hidden states at which the slots are evaluated.

    Slot t of a response is evaluated at the last token read before it: the state in which action t was chosen (spec
    §1). Tokens after a row's last slot have no influence and are not read.

    Attributes:
        rows: Prompts and responses, without padding.
        states: For each slot, the index of its state among all tokens read.
        slots: The actions, and one more slot per row if the value after the last action is requested.
        action_mask: The actions.
        actions: Their token ids.
    """

    rows: TokenRows
    states: Int[Tensor, " slots"]
    slots: Bool[Tensor, "batch time"]
    action_mask: Bool[Tensor, "batch time"]
    actions: Int[Tensor, " actions"]

    @classmethod
    def of(cls, rollout: Rollout, *, after_last: bool = False) -> _Reading:
        mask = rollout.action_mask
        columns = torch.arange(mask.shape[1], device=mask.device)
        last = (columns * mask).amax(dim=1, keepdim=True)
        slots = mask
        if after_last:
            last = (last + 1).clamp(max=len(columns) - 1)
            slots = mask | (columns == last)
        ids = torch.cat([rollout.prompt_ids, rollout.response_ids[:, :-1]], dim=1)
        read = torch.cat([rollout.prompt_mask, (rollout.token_mask & (columns < last))[:, :-1]], dim=1)
        # Number of tokens read up to each column, over all rows; a slot's state is the last of them.
        newest = read.flatten().cumsum(0).view(read.shape)[:, rollout.prompt_ids.shape[1] - 1 :] - 1
        return cls(TokenRows.unpad(ids, read), newest[slots], slots, mask, rollout.response_ids[mask])

    def at_actions(self, states: Tensor) -> Tensor:
        """Select the entries of the actions from one entry per slot."""
        if self.slots is self.action_mask:
            return states
        # By number: states without contents, as of a plan, cannot be selected with a mask.
        return states[self.action_mask[self.slots].nonzero().flatten()]

    def pad(
        self, figures: Float[Tensor, "slots *each"], slots: Bool[Tensor, "batch time"]
    ) -> Float[Tensor, "batch time *each"]:
        """Scatter into the rollout's padded shape, 0 elsewhere."""
        each = figures.shape[1:]
        mask = slots.view(*slots.shape, *(1 for _ in each))
        return figures.new_zeros((*slots.shape, *each)).masked_scatter(mask, figures)


def response_logprobs(
    model: LanguageModel, rollout: Rollout, *, temperature: float, precision: Precision = "fp32"
) -> Float[Tensor, "batch time"]:
    """Log probabilities (nats) of the actions under `model`, 0 elsewhere; used for the frozen reference."""
    reading = _Reading.of(rollout)
    with autocast("bf16" if model.holds_bf16 else precision, model.device):
        hidden = model.hidden(reading.rows)[reading.states]
        logprobs, _ = model.over_logits(
            partial(token_logprobs_and_entropy, temperature=temperature), hidden, reading.actions
        )
    return reading.pad(logprobs, reading.action_mask)


class ActorCritic(nn.Module):
    """The policy and its critic: a head on the policy's trunk, a separate model, or none.

    Args:
        policy: The policy; its value head, if any, is the critic.
        critic: A separate critic, for a policy without a value head.
        value_gradient: Whether the gradient of the values reaches the trunk that a value head shares with the policy,
            or ends at the head.

    Attributes:
        values_started: False for a new critic whose values are still to be started from the first returns; see
            `start_values`. None without a critic.

    Source: spec §7.34.
    """

    values_started: Tensor | None

    def __init__(
        self, policy: LanguageModel, critic: ScalarModel | None = None, *, value_gradient: ValueGradient = "trunk"
    ) -> None:
        super().__init__()
        assert policy.value_head is None or critic is None, "at most one critic: a value head or a model"
        self.policy = policy
        self.critic = critic
        self.value_gradient = value_gradient
        # A buffer, so that it returns with the weights that it describes when these are restored.
        started = torch.tensor(True, device=policy.device) if self.has_critic else None
        self.register_buffer("values_started", started, persistent=False)

    @property
    def device(self) -> torch.device:
        """The policy's device."""
        return self.policy.device

    @property
    def has_critic(self) -> bool:
        """Whether the model has a value head or a separate critic."""
        return self.critic is not None or self.policy.value_head is not None

    def policy_parameters(self) -> Iterator[nn.Parameter]:
        """The policy's parameters without the value head; frozen while the critic warms up."""
        return self.policy.causal.parameters()

    @property
    def value_head(self) -> ValueHead | None:
        """The critic's output layer; None without a critic."""
        return self.policy.value_head if self.critic is None else self.critic.value_head

    @torch.no_grad()
    def start_values(
        self,
        values: Float[Tensor, "batch time"],
        returns: Float[Tensor, "batch time"],
        mask: Bool[Tensor, "batch time"],
    ) -> Float[Tensor, "batch time"]:
        """Map a new critic's outputs V to a + b·V, the least-squares fit to the first returns; return the new values.

        b = max(0, cov(V, R)/var(V)),  a = mean(R) − b·mean(V);  b = 0 where V is constant

        A critic whose head is 0 starts at the mean return, and the readout of a reward model is kept as far as it
        predicts the returns. Neither depends on the unit of the reward. Returns that are all equal say nothing about b:
        it is 1 then, and the next batch is fitted again. Numbers that are not finite are left to the guard.

        Args:
            values: V of the actions, as collected.
            returns: Their Monte Carlo returns, which contain no value.
            mask: True = counts.

        Source: kedge; PopArt (van Hasselt et al. 2016) starts and rescales an output layer in this way.
        """
        head, started = self.value_head, self.values_started
        assert isinstance(head, nn.Linear), "the support of a histogram is a setting"
        assert started is not None
        counted = values[mask].double()
        targets = returns[mask].double()
        if not (counted.isfinite().all() and targets.isfinite().all()):
            return values
        spread, gain = float(counted.var(correction=0)), 0.0
        varies = float(targets.std(correction=0)) > ROUNDING * float(targets.abs().max())
        if not varies:
            gain = 1.0
        elif spread > ROUNDING**2 * float(counted.square().mean()):
            covariance = (counted - counted.mean()) * (targets - targets.mean())
            gain = max(0.0, float(covariance.mean()) / spread)
        offset = float(targets.mean() - gain * counted.mean())
        if self.critic is not None:
            self.critic.rescale(gain, offset)
        else:
            scale_head(head, gain)
            head.bias.add_(offset)
        started.fill_(varies)
        return torch.where(mask, gain * values + offset, 0.0)

    def critic_parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of the value head or of the separate critic."""
        critic = self.critic if self.critic is not None else self.policy.value_head
        return iter(()) if critic is None else critic.parameters()

    def separable_parameters(self) -> Iterator[nn.Parameter]:
        """The critic's parameters if no gradient of the values reaches the policy, so that nothing is shared."""
        separable = self.critic is not None or self.value_gradient == "head"
        return self.critic_parameters() if separable else iter(())

    def checkpoint_activations(self) -> None:
        """Recompute activations in the backward pass from now on; see `Trunk.checkpoint_activations`."""
        self.policy.trunk.checkpoint_activations()
        if self.critic is not None and self.critic.trunk is not None:
            self.critic.trunk.checkpoint_activations()

    def forward(
        self,
        rollout: Rollout,
        *,
        temperature: float,
        precision: Precision = "fp32",
        entropy_gradient: bool = False,
        value_after_last: bool = False,
    ) -> PolicyOutputs:
        """Evaluate the actions of some rows under the current weights.

        Args:
            rollout: The rows.
            temperature: The sampling temperature; divides the logits as in sampling (spec §4.14).
            precision: Number format of the matrix products.
            entropy_gradient: Keep the entropy differentiable, for an entropy bonus; otherwise it is only a metric.
            value_after_last: Also return the value of the state after the last action if the rollout is wide enough:
                the slot of the score with `score_at: after_last`.
        """
        reading = _Reading.of(rollout, after_last=value_after_last)
        measure = partial(token_logprobs_and_entropy, temperature=temperature, entropy_gradient=entropy_gradient)
        with autocast(precision, self.device):
            hidden = self.policy.hidden(reading.rows)[reading.states]
            logprobs, entropy = self.policy.over_logits(measure, reading.at_actions(hidden), reading.actions)
            shared = hidden if self.value_gradient == "trunk" else hidden.detach()
            values = self._read_values(reading, shared) if self.has_critic else None
        return PolicyOutputs(
            logprobs=reading.pad(logprobs, reading.action_mask),
            entropy=reading.pad(entropy, reading.action_mask),
            values=None if values is None else reading.pad(values.values, reading.slots),
            value_logits=None if values is None or values.logits is None else reading.pad(values.logits, reading.slots),
        )

    def value_states(
        self, rollout: Rollout, *, precision: Precision = "fp32", value_after_last: bool = False
    ) -> Float[Tensor, "slots dim"]:
        """The hidden states that the critic's head reads, row by row, in the order of the slots."""
        reading = _Reading.of(rollout, after_last=value_after_last)
        trunk = self.policy.trunk if self.critic is None else self.critic.trunk
        assert trunk is not None, "a critic has a value at every token"
        with autocast(precision, self.device):
            return trunk.hidden(reading.rows)[reading.states]

    def critic_outputs(
        self, rollout: Rollout, *, precision: Precision = "fp32", value_after_last: bool = False
    ) -> CriticOutputs:
        """Evaluate the critic alone. The gradient reaches its own parameters: a shared trunk is read without a graph.

        Args:
            rollout: The rows.
            precision: See `forward`.
            value_after_last: See `forward`.
        """
        reading = _Reading.of(rollout, after_last=value_after_last)
        with autocast(precision, self.device):
            shared = None
            if self.critic is None:
                with torch.no_grad():
                    shared = self.policy.hidden(reading.rows)[reading.states]
            values, logits = self._read_values(reading, shared)
            return CriticOutputs(
                values=reading.pad(values, reading.slots),
                value_logits=None if logits is None else reading.pad(logits, reading.slots),
            )

    def values(
        self, rollout: Rollout, *, precision: Precision = "fp32", value_after_last: bool = False
    ) -> Float[Tensor, "batch time"]:
        """Only the critic's values, as in `PolicyOutputs`; used when the log probabilities are already known."""
        return self.critic_outputs(rollout, precision=precision, value_after_last=value_after_last).values

    def _read_values(self, reading: _Reading, hidden: Tensor | None) -> Values:
        if self.critic is not None:
            values, logits = self.critic.read_values(reading.rows)
            return Values(values[reading.states], None if logits is None else logits[reading.states])
        assert hidden is not None
        return self.policy.read_values(hidden)
