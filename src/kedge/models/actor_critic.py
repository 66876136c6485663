"""The one forward pass over prompts and responses that collection and training share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from kedge.algorithm.experience import Rollout
from kedge.algorithm.logprobs import token_logprobs_and_entropy
from kedge.models.language import LanguageModel
from kedge.models.packing.rows import TokenRows
from kedge.models.precision import autocast
from kedge.models.scalar import ScalarModel

__all__ = ["ActorCritic", "ResponseOutputs", "response_logprobs"]


@dataclass(frozen=True)
class ResponseOutputs:
    """What the models say about the response tokens of some rows, float32, padded to the rollout's width.

    Attributes:
        logprobs: Log probability (nats) of each response token, at the sampling temperature; 0 in padding.
        entropy: Entropy (nats) of the distribution that each token was drawn from; 0 in padding.
        values: The critic's value of the state before each token; 0 in padding, but for the slot after the last token
            where that was asked for.
    """

    logprobs: Float[Tensor, "batch time"]
    entropy: Float[Tensor, "batch time"]
    values: Float[Tensor, "batch time"]


@dataclass(frozen=True)
class _Reading:
    """What a forward pass reads of a rollout, and at which tokens something is asked.

    Slot t of a response is asked about at the token before it, C−1+t of its row (spec §1): the last token of a row that
    nobody asks about is not read at all.

    Attributes:
        rows: Prompts and responses, without padding.
        states: Where among the tokens the slots are asked about, slot by slot.
        slots: The slots themselves: the response mask, and one more per row where the value after it is wanted.
        response_mask: The slots of tokens.
        tokens: The response tokens.
    """

    rows: TokenRows
    states: Int[Tensor, " slots"]
    slots: Bool[Tensor, "batch time"]
    response_mask: Bool[Tensor, "batch time"]
    tokens: Int[Tensor, " counted"]

    @classmethod
    def of(cls, rollout: Rollout, *, after_last: bool = False) -> _Reading:
        mask = rollout.response_mask
        slots = mask | nn.functional.pad(mask[:, :-1], (1, 0), value=True) if after_last else mask
        ids = torch.cat([rollout.prompt_ids, rollout.response_ids[:, :-1]], dim=1)
        read = torch.cat([rollout.prompt_mask, slots[:, 1:]], dim=1)
        before = torch.zeros_like(rollout.prompt_mask[:, 1:])
        states = torch.cat([before, slots], dim=1)[read].nonzero().squeeze(1)
        return cls(TokenRows.unpad(ids, read), states, slots, mask, rollout.response_ids[mask])

    def at_tokens(self, states: Tensor) -> Tensor:
        """Of something that every slot has: that of the slots with a token."""
        return states if self.slots is self.response_mask else states[self.response_mask[self.slots]]

    def pad(self, figures: Float[Tensor, " slots"], slots: Bool[Tensor, "batch time"]) -> Float[Tensor, "batch time"]:
        """Back into the rollout's rectangle, 0 elsewhere."""
        return figures.new_zeros(slots.shape).masked_scatter(slots, figures)


def response_logprobs(
    model: LanguageModel, rollout: Rollout, *, temperature: float, precision: Literal["fp32", "bf16"] = "fp32"
) -> Float[Tensor, "batch time"]:
    """Log probabilities (nats) that `model` gives to the response tokens; 0 in padding. For the frozen reference."""
    reading = _Reading.of(rollout)
    with autocast(precision, model.device):
        hidden = model.hidden(reading.rows)[reading.states]
        logprobs, _ = model.over_logits(
            partial(token_logprobs_and_entropy, temperature=temperature), hidden, reading.tokens
        )
    return reading.pad(logprobs, reading.response_mask)


class ActorCritic(nn.Module):
    """The policy and its critic: a head on the policy's own trunk, or a model of its own.

    Args:
        policy: The policy; it carries a value head exactly if there is no separate critic.
        critic: A separate critic, or None for the shared trunk.

    Source: spec §7.34.
    """

    def __init__(self, policy: LanguageModel, critic: ScalarModel | None = None) -> None:
        super().__init__()
        assert (policy.value_head is None) == (critic is not None), "exactly one critic: a value head or a model"
        self.policy = policy
        self.critic = critic

    @property
    def device(self) -> torch.device:
        """Where the policy lives."""
        return self.policy.device

    def policy_parameters(self) -> Iterator[nn.Parameter]:
        """What only the policy loss should move: everything that is frozen while the critic warms up."""
        return self.policy.causal.parameters()

    def critic_parameters(self) -> Iterator[nn.Parameter]:
        """The value head, or the separate critic."""
        critic = self.critic if self.critic is not None else self.policy.value_head
        assert critic is not None
        return critic.parameters()

    def checkpoint_activations(self) -> None:
        """From now on trade time for memory: see `Trunk.checkpoint_activations`."""
        self.policy.trunk.checkpoint_activations()
        if self.critic is not None and self.critic.trunk is not None:
            self.critic.trunk.checkpoint_activations()

    def forward(
        self,
        rollout: Rollout,
        *,
        temperature: float,
        precision: Literal["fp32", "bf16"] = "fp32",
        entropy_gradient: bool = False,
        value_after_last: bool = False,
    ) -> ResponseOutputs:
        """Evaluate the response tokens of some rows under the current weights.

        Args:
            rollout: The rows.
            temperature: The sampling temperature; it divides the logits here as it did there (spec §4.14).
            precision: Number format of the matrix products.
            entropy_gradient: Keep the entropy differentiable (an entropy bonus is paid); else it is a metric.
            value_after_last: Also give the value of the state after the last token, where the rollout is wide enough:
                the slot that the score stands at with `score_at: after_last`.
        """
        reading = _Reading.of(rollout, after_last=value_after_last)
        measure = partial(token_logprobs_and_entropy, temperature=temperature, entropy_gradient=entropy_gradient)
        with autocast(precision, self.device):
            hidden = self.policy.hidden(reading.rows)[reading.states]
            logprobs, entropy = self.policy.over_logits(measure, reading.at_tokens(hidden), reading.tokens)
            values = self._values(reading, hidden)
        return ResponseOutputs(
            logprobs=reading.pad(logprobs, reading.response_mask),
            entropy=reading.pad(entropy, reading.response_mask),
            values=reading.pad(values, reading.slots),
        )

    def values(
        self, rollout: Rollout, *, precision: Literal["fp32", "bf16"] = "fp32", value_after_last: bool = False
    ) -> Float[Tensor, "batch time"]:
        """The critic's values alone, as in `ResponseOutputs`: where the log probabilities are known already."""
        reading = _Reading.of(rollout, after_last=value_after_last)
        with autocast(precision, self.device):
            shared = self.policy.hidden(reading.rows)[reading.states] if self.critic is None else None
            return reading.pad(self._values(reading, shared), reading.slots)

    def _values(self, reading: _Reading, hidden: Tensor | None) -> Tensor:
        if self.critic is not None:
            return self.critic.values(reading.rows)[reading.states]
        assert hidden is not None
        return self.policy.values(hidden)
