"""The one forward pass over prompts and responses that collection and training share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from kedge.algorithm.experience import Rollout
from kedge.algorithm.logprobs import token_entropy, token_logprobs
from kedge.models.language import LanguageModel
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
class _Rows:
    """Rows cut to their longest prompt and response: what a forward pass sees."""

    input_ids: Int[Tensor, "batch seq"]
    attention_mask: Bool[Tensor, "batch seq"]
    response_ids: Int[Tensor, "batch cut_time"]
    response_mask: Bool[Tensor, "batch cut_time"]
    prompt_width: int
    time: int

    @property
    def states(self) -> slice:
        """The positions C−1 … C+T−2, at which the model has yet to emit response token t (spec §1)."""
        return slice(self.prompt_width - 1, self.prompt_width - 1 + self.response_ids.shape[1])

    @property
    def value_mask(self) -> Bool[Tensor, "batch cut_time"]:
        """The response mask and one slot more: the state after the last token has a value, too."""
        after = nn.functional.pad(self.response_mask[:, :-1], (1, 0), value=True)
        return self.response_mask | after

    def pad(self, outputs: Tensor, mask: Tensor) -> Tensor:
        """Back to the rollout's width, zero where the mask does not count."""
        outputs = torch.where(mask, outputs, 0.0)
        return nn.functional.pad(outputs, (0, self.time - outputs.shape[1]))


def _cut(rollout: Rollout, *, slots_after: int = 0) -> _Rows:
    prompt_width = int(rollout.prompt_mask.sum(dim=1).max())
    time = int(rollout.response_mask.sum(dim=1).max()) + slots_after
    prompt_ids, prompt_mask = rollout.prompt_ids[:, -prompt_width:], rollout.prompt_mask[:, -prompt_width:]
    response_ids, response_mask = rollout.response_ids[:, :time], rollout.response_mask[:, :time]
    return _Rows(
        input_ids=torch.cat([prompt_ids, response_ids], dim=1),
        attention_mask=torch.cat([prompt_mask, response_mask], dim=1),
        response_ids=response_ids,
        response_mask=response_mask,
        prompt_width=prompt_width,
        time=rollout.response_ids.shape[1],
    )


def response_logprobs(
    model: LanguageModel, rollout: Rollout, *, temperature: float, precision: Literal["fp32", "bf16"] = "fp32"
) -> Float[Tensor, "batch time"]:
    """Log probabilities (nats) that `model` gives to the response tokens; 0 in padding. For the frozen reference."""
    rows = _cut(rollout)
    with autocast(precision, model.device):
        hidden = model.hidden(rows.input_ids, rows.attention_mask)[:, rows.states]
        logits = model.logits(hidden)
    return rows.pad(token_logprobs(logits, rows.response_ids, temperature=temperature), rows.response_mask)


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
        rows = _cut(rollout, slots_after=int(value_after_last))
        with autocast(precision, self.device):
            hidden = self.policy.hidden(rows.input_ids, rows.attention_mask)[:, rows.states]
            logits = self.policy.logits(hidden)
            values = self._values(rows, hidden)
        logprobs = token_logprobs(logits, rows.response_ids, temperature=temperature)
        entropy = token_entropy(logits if entropy_gradient else logits.detach(), temperature=temperature)
        return ResponseOutputs(
            logprobs=rows.pad(logprobs, rows.response_mask),
            entropy=rows.pad(entropy, rows.response_mask),
            values=rows.pad(values, rows.value_mask if value_after_last else rows.response_mask),
        )

    def _values(self, rows: _Rows, hidden: Tensor) -> Tensor:
        if self.critic is None:
            return self.policy.values(hidden)
        return self.critic.values(rows.input_ids, rows.attention_mask)[:, rows.states]
