"""What one recorded update does to one token: every figure by kedge's own functions, from the record's raw ones."""

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

__all__ = ["TokenStory", "read_record", "tell_story"]


@dataclass(frozen=True)
class TokenStory:
    """The followed response, a figure per token, and the figures of the followed token.

    Attributes:
        record: What was written down, as it was.
        row: Which response is followed.
        token: Which of its tokens.
        tokens: The response's tokens as text.
        score: The response's.
        mask: True on the tokens of all responses.
        logprobs: Under the policy that sampled, nats; of all responses, as the next ones.
        ref_logprobs: Under the reference, nats.
        kl: Of the policy to the reference, nats, sampled.
        rewards: The score at the end, less what each token pays.
        values: The critic's forecast before each token.
        residuals: δ, the surprise at each token.
        raw_advantages: A, before whitening.
        advantages: A, as the loss sees it.
        returns: The critic's targets.
        ratios: Per epoch the ratio ρ of each token after it.
        losses: Per epoch the followed token's part of the loss, at the ratio that the epoch began with.
        held: Per epoch whether the clip held the followed token back.
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
    held: list[bool]

    def of(self, figures: Tensor) -> list[float]:
        """The followed response's figures, without padding."""
        return figures[self.row][self.mask[self.row]].tolist()

    def at(self, figures: Tensor) -> float:
        """The followed token's figure."""
        return float(figures[self.row, self.token])

    def setting(self, name: str) -> float:
        """A setting of the recorded run."""
        return self.record["settings"][name]

    @property
    def sequence_kl(self) -> float:
        """KL of the followed response, nats."""
        return float(sequence_kl(self.logprobs, self.ref_logprobs, self.mask)[self.row])

    @property
    def advantage_mean(self) -> float:
        """Mean of the batch's advantages before whitening."""
        return float(masked_mean(self.raw_advantages, self.mask))

    @property
    def advantage_std(self) -> float:
        """Their standard deviation."""
        return float(self.raw_advantages[self.mask].std(correction=0))

    @property
    def returns_std(self) -> float:
        """Standard deviation of the batch's returns: the unit of the value loss."""
        return float(self.returns[self.mask].std(correction=0))

    @property
    def value_loss(self) -> float:
        """The followed token's part of the value loss in the first epoch."""
        value, target = (
            figures[self.row, self.token].reshape(1, 1) / self.returns_std for figures in (self.values, self.returns)
        )
        limit = self.setting("value_clip_range")
        return float(
            clipped_value_loss(value, value, target, torch.ones(1, 1, dtype=torch.bool), clip_range=limit).loss
        )


def read_record() -> dict[str, Any]:
    """The update as `handbook.record` wrote it down."""
    return json.loads(RECORD.read_text(encoding="utf-8"))


def tell_story(record: dict[str, Any]) -> TokenStory:
    """Compute what the update made of the record's raw figures."""
    rows, settings = record["responses"], record["settings"]
    row, token = record["row"], record["token"]
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
    return TokenStory(
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
        held=[held for _, held in steps],
    )


def _policy_step(
    start: Tensor, logprobs: Tensor, advantages: Tensor, row: int, token: int, settings: dict[str, Any]
) -> tuple[float, bool]:
    """The followed token's loss at the start of an epoch, and whether the clip holds it back."""
    now, old, advantage = (figures[row, token].reshape(1, 1) for figures in (start, logprobs, advantages))
    step = clipped_policy_loss(
        now, old, advantage, torch.ones(1, 1, dtype=torch.bool), clip_range=settings["clip_range"]
    )
    return float(step.loss), bool(step.clip_fraction)


def _padded(rows: list[list[float]]) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [0.0] * (width - len(row)) for row in rows])
