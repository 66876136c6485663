"""The effect of a recorded update on one token, computed from the record by kedge's own functions."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from handbook.record import RECORD
from kedge.algorithm import (
    clipped_policy_loss,
    clipped_value_loss,
    generalized_advantages,
    kl_estimate,
    masked_mean,
    masked_whiten,
    sequence_kl,
    shape_rewards,
)


@dataclass(frozen=True)
class TokenUpdate:
    """One response of a batch with its values per token, and one of its tokens.

    Attributes:
        record: The record.
        row: Index of the response.
        token: Position of the token in the response.
        tokens: The response's tokens as text.
        score: The response's score.
        mask: True on the tokens of all responses, [batch, time] like the tensors below.
        logprobs: Under the sampling policy, nats.
        ref_logprobs: Under the reference, nats.
        kl: Sampled KL of the policy to the reference, nats.
        rewards: The KL penalty of each token, plus the score at the last.
        values: The critic's value before each token.
        residuals: δ, the TD residual of each token.
        raw_advantages: A before whitening.
        advantages: A after whitening.
        returns: The critic's targets.
        ratios: ρ after each epoch, [epoch, batch, time].
        losses: Per epoch, the token's part of the policy loss at the start of the epoch.
        clipped: Per epoch, whether the token was clipped at the start of the epoch.
    """

    record: dict[str, Any]
    row: int
    token: int
    tokens: list[str]
    score: float
    mask: Tensor
    logprobs: Tensor
    ref_logprobs: Tensor
    kl: Tensor
    rewards: Tensor
    values: Tensor
    residuals: Tensor
    raw_advantages: Tensor
    advantages: Tensor
    returns: Tensor
    ratios: Tensor
    losses: list[float]
    clipped: list[bool]

    def of(self, values: Tensor) -> list[float]:
        """The response's values, without padding."""
        return values[self.row][self.mask[self.row]].tolist()

    def at(self, values: Tensor) -> float:
        """The token's value."""
        return float(values[self.row, self.token])

    def setting(self, name: str) -> float:
        """A setting of the recorded run."""
        return self.record["settings"][name]

    @property
    def sequence_kl(self) -> float:
        """KL of the response, nats."""
        return float(sequence_kl(self.logprobs, self.ref_logprobs, self.mask)[self.row])

    @property
    def advantage_mean(self) -> float:
        """Mean of the batch's advantages before whitening."""
        return float(masked_mean(self.raw_advantages, self.mask))

    @property
    def advantage_std(self) -> float:
        """Standard deviation of the batch's advantages before whitening."""
        return float(self.raw_advantages[self.mask].std(correction=0))

    @property
    def returns_std(self) -> float:
        """Standard deviation of the batch's returns: the unit of the value loss."""
        return float(self.returns[self.mask].std(correction=0))

    @property
    def value_loss(self) -> float:
        """The token's part of the value loss in the first epoch."""
        value, target = (
            tensor[self.row, self.token].reshape(1, 1) / self.returns_std for tensor in (self.values, self.returns)
        )
        limit = self.setting("value_clip_range")
        return float(
            clipped_value_loss(value, value, target, torch.ones(1, 1, dtype=torch.bool), clip_range=limit).loss
        )


def read_record() -> dict[str, Any]:
    """The update recorded by `handbook.record`."""
    return json.loads(RECORD.read_text(encoding="utf-8"))


def compute_update(record: dict[str, Any]) -> TokenUpdate:
    """Recompute the update from the record."""
    rows = record["responses"]
    settings = record["settings"]
    row = record["row"]
    token = record["token"]
    mask = _padded([[1.0] * len(each["tokens"]) for each in rows]).bool()
    logprobs, ref_logprobs, values = (
        _padded([each[name] for each in rows]) for name in ("logprobs", "ref_logprobs", "values")
    )
    scores = torch.tensor([each["score"] for each in rows])
    rewards, _ = shape_rewards(scores, logprobs, ref_logprobs, mask, kl_coef=settings["kl_coef"])
    gae = {"gamma": settings["gamma"], "gae_lambda": settings["gae_lambda"]}
    raw, returns = generalized_advantages(rewards, values, mask, **gae)
    advantages = masked_whiten(raw, mask)
    after = [_padded([each["epochs"][epoch] for each in rows]) for epoch in range(settings["num_epochs"])]
    steps = [_policy_step(start, logprobs, advantages, row, token, settings) for start in [logprobs, *after[:-1]]]
    return TokenUpdate(
        record=record,
        row=row,
        token=token,
        tokens=rows[row]["tokens"],
        score=rows[row]["score"],
        mask=mask,
        logprobs=logprobs,
        ref_logprobs=ref_logprobs,
        kl=kl_estimate(logprobs, ref_logprobs),
        rewards=rewards,
        values=values,
        residuals=generalized_advantages(rewards, values, mask, gamma=settings["gamma"], gae_lambda=0.0).advantages,
        raw_advantages=raw,
        advantages=advantages,
        returns=returns,
        ratios=torch.stack([(each - logprobs).exp() for each in after]),
        losses=[loss for loss, _ in steps],
        clipped=[clipped for _, clipped in steps],
    )


def _policy_step(
    start: Tensor, logprobs: Tensor, advantages: Tensor, row: int, token: int, settings: dict[str, Any]
) -> tuple[float, bool]:
    """The token's loss at the start of an epoch, and whether it is clipped."""
    now, old, advantage = (tensor[row, token].reshape(1, 1) for tensor in (start, logprobs, advantages))
    step = clipped_policy_loss(
        now, old, advantage, torch.ones(1, 1, dtype=torch.bool), clip_range=settings["clip_range"]
    )
    return float(step.loss), bool(step.clip_fraction)


def _padded(rows: list[list[float]]) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [0.0] * (width - len(row)) for row in rows])
