"""What a rollout holds, and the experience that the PPO epochs learn from.

Both are frozen: the epochs read them, nothing writes to them. Masks say True where a slot counts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

__all__ = ["Experience", "Rollout"]


@dataclass(frozen=True)
class Rollout:
    """What the policy did: padded prompts and responses, as sampled.

    With `L` the index of a response's last real token (the stop token where one was sampled), `response_mask` is True
    where `t <= L`. Whatever stands in a masked slot is padding and must never matter.

    Attributes:
        prompt_ids: token ids, left-padded.
        prompt_mask: True on real prompt tokens.
        response_ids: token ids, right-padded, the stop token included.
        response_mask: True on real response tokens.
        logprobs: log probability (nats) of each response token when it was sampled, under the sampling temperature;
            0 in padding.
        stopped: True where the response ended with the stop token, False where it was cut at its length limit.
        policy_version: number of updates that the sampling policy had seen.
        values: the critic's value of the state before each token, 0 in padding, where the engine samples from a trunk
            that carries the critic's head; else None.

    Source: spec §1, §4.15.
    """

    prompt_ids: Int[Tensor, "batch prompt"]
    prompt_mask: Bool[Tensor, "batch prompt"]
    response_ids: Int[Tensor, "batch time"]
    response_mask: Bool[Tensor, "batch time"]
    logprobs: Float[Tensor, "batch time"]
    stopped: Bool[Tensor, " batch"]
    policy_version: int
    values: Float[Tensor, "batch time"] | None = None

    @property
    def num_responses(self) -> int:
        """Rows of the batch."""
        return self.response_ids.shape[0]

    @property
    def num_tokens(self) -> int:
        """Counted response tokens of the whole batch: the divisor of a token mean."""
        return int(self.response_mask.sum())

    @property
    def row_lengths(self) -> list[int]:
        """Counted tokens of each prompt with its response: what a model reads for a row."""
        return cast("list[int]", (self.prompt_mask.sum(-1) + self.response_mask.sum(-1)).tolist())  # pyright: ignore[reportUnknownMemberType]

    @property
    def response_lengths(self) -> Int[Tensor, " batch"]:
        """Counted tokens per response."""
        return self.response_mask.sum(-1)

    def select(self, rows: Int[Tensor, " selected"] | slice) -> Rollout:
        """The rollout of some rows, in the order of `rows`; the padded widths stay."""
        return replace(
            self,
            prompt_ids=self.prompt_ids[rows],
            prompt_mask=self.prompt_mask[rows],
            response_ids=self.response_ids[rows],
            response_mask=self.response_mask[rows],
            logprobs=self.logprobs[rows],
            values=None if self.values is None else self.values[rows],
            stopped=self.stopped[rows],
        )


@dataclass(frozen=True)
class Experience:
    """A rollout and what everybody thinks of it; frozen during the PPO epochs.

    Attributes:
        rollout: what the policy did.
        scores: one number per response, from the reward source, after any penalty for a missing stop token and before
            any KL.
        old_logprobs: log probabilities (nats) under the weights at the start of the epochs, as the trainer computes
            them: the denominator of the PPO ratio. They equal `rollout.logprobs` where sampler and trainer agree.
        ref_logprobs: the same tokens' log probabilities under the frozen reference, at the same temperature; None where
            no reference model takes part.
        values: the critic's value of the state before each token.
        rewards: one number per token: the score at its slot, less the KL penalty where it lies in the reward.
        reward_mask: True where rewards, values, advantages and returns count: the response mask, and one slot more
            where the score stands after the last token.
        advantages: what the policy loss weighs each token by (whitened where that is asked for).
        returns: the critic's targets, always from the unwhitened advantages.

    Source: spec §1, §5.
    """

    rollout: Rollout
    scores: Float[Tensor, " batch"]
    old_logprobs: Float[Tensor, "batch time"]
    ref_logprobs: Float[Tensor, "batch time"] | None
    values: Float[Tensor, "batch time"]
    rewards: Float[Tensor, "batch time"]
    reward_mask: Bool[Tensor, "batch time"]
    advantages: Float[Tensor, "batch time"]
    returns: Float[Tensor, "batch time"]

    @property
    def kl(self) -> Float[Tensor, "batch time"]:
        """Log ratio of the policy over the reference per sampled token, nats: the k1 estimate; 0 in padding.

        Its sum over a response estimates that response's KL divergence (`objective/kl` is the batch mean of the sums).
        Single entries may be negative. All zero where no reference takes part.
        """
        reference = self.old_logprobs if self.ref_logprobs is None else self.ref_logprobs
        return torch.where(self.rollout.response_mask, self.old_logprobs - reference, 0.0)

    def select(self, rows: Int[Tensor, " selected"] | slice) -> Experience:
        """The experience of some rows, in the order of `rows`; the padded widths stay."""
        return Experience(
            rollout=self.rollout.select(rows),
            scores=self.scores[rows],
            old_logprobs=self.old_logprobs[rows],
            ref_logprobs=None if self.ref_logprobs is None else self.ref_logprobs[rows],
            values=self.values[rows],
            rewards=self.rewards[rows],
            reward_mask=self.reward_mask[rows],
            advantages=self.advantages[rows],
            returns=self.returns[rows],
        )
