"""What a rollout holds, and the experience that the PPO epochs learn from.

Both are frozen: the epochs only read them. Masks are True where a slot counts.

Two masks describe a response:

    token_mask   the tokens that a model reads, and that later tokens are conditioned on
    action_mask  the tokens that the policy chose: they are trained, and they alone carry log probabilities, entropy,
                 KL, rewards, values and advantages

Every action is read: action_mask ⊆ token_mask. A token that is read but was not chosen (a tool's output, a user's turn)
changes the log probabilities of what follows and nothing else. A slot in neither mask is padding and must never matter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kedge.algorithm.checks import check_same_shape
from kedge.errors import ShapeError

__all__ = ["Experience", "PolicyOutputs", "Rollout", "check_masks"]


@dataclass(frozen=True)
class Rollout:
    """What the policy did: padded prompts and responses, as sampled.

    Attributes:
        prompt_ids: token ids, left-padded.
        prompt_mask: True on prompt tokens.
        response_ids: token ids, right-padded, the stop token included.
        token_mask: True on response tokens that a model reads.
        action_mask: True on response tokens that the policy chose; a subset of `token_mask`, at least one in each row.
        logprobs: log probability (nats) of each action when it was sampled, at the sampling temperature; 0 elsewhere.
        stopped: True where the response ended with the stop token, False where it was cut at its length limit.
        group: number of the prompt that a row answers; rows of one group share a prompt. Kept when rows are dropped.
        policy_version: number of updates that the policy had seen when it sampled the row.
        values: the critic's value of the state before each action, 0 elsewhere, where the engine samples from a trunk
            that carries the critic's head; else None.

    Source: spec §1, §4.15.
    """

    prompt_ids: Int[Tensor, "batch prompt"]
    prompt_mask: Bool[Tensor, "batch prompt"]
    response_ids: Int[Tensor, "batch time"]
    token_mask: Bool[Tensor, "batch time"]
    action_mask: Bool[Tensor, "batch time"]
    logprobs: Float[Tensor, "batch time"]
    stopped: Bool[Tensor, " batch"]
    group: Int[Tensor, " batch"]
    policy_version: Int[Tensor, " batch"]
    values: Float[Tensor, "batch time"] | None = None

    @property
    def num_responses(self) -> int:
        """Rows of the batch."""
        return self.response_ids.shape[0]

    @property
    def num_actions(self) -> int:
        """Actions of the whole batch: the divisor of a token mean."""
        return int(self.action_mask.sum())

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole batch that a model reads, prompts included."""
        return int(self.prompt_mask.sum() + self.token_mask.sum())

    @property
    def row_lengths(self) -> list[int]:
        """Tokens of each row that a model reads, prompt included."""
        return cast("list[int]", (self.prompt_mask.sum(-1) + self.token_mask.sum(-1)).tolist())  # pyright: ignore[reportUnknownMemberType]

    @property
    def response_lengths(self) -> Int[Tensor, " batch"]:
        """Actions per response."""
        return self.action_mask.sum(-1)

    def select(self, rows: Int[Tensor, " selected"] | slice) -> Rollout:
        """The rollout of some rows, in the order of `rows`; padded widths and group numbers stay."""
        return replace(
            self,
            prompt_ids=self.prompt_ids[rows],
            prompt_mask=self.prompt_mask[rows],
            response_ids=self.response_ids[rows],
            token_mask=self.token_mask[rows],
            action_mask=self.action_mask[rows],
            logprobs=self.logprobs[rows],
            stopped=self.stopped[rows],
            group=self.group[rows],
            policy_version=self.policy_version[rows],
            values=None if self.values is None else self.values[rows],
        )


@dataclass(frozen=True)
class Experience:
    """A rollout with scores, reference log probabilities, values, rewards, advantages and returns.

    Attributes:
        rollout: what the policy did.
        scores: one number per response, from the reward source, after any penalty for a missing stop token and before
            any KL.
        token_scores: one number per action, from a process reward, on top of `scores`; 0 elsewhere. None where no
            source scores tokens.
        old_logprobs: log probabilities (nats) under the weights at the start of the epochs, as the trainer computes
            them: the denominator of the PPO ratio. They equal `rollout.logprobs` where sampler and trainer agree.
        ref_logprobs: the same actions' log probabilities under the frozen reference, at the same temperature; None
            without a reference model.
        values: the critic's value of the state before each action; None without a critic.
        rewards: one number per action: the score at its slot, less the KL penalty where it lies in the reward.
        reward_mask: True where rewards, values, advantages and returns count: the actions, and one slot more where the
            score stands after the last one.
        advantages: what the policy loss weighs each action by (whitened where that is configured).
        returns: the critic's targets, always from the unwhitened advantages.
        importance_weights: factor of each action's policy loss, which corrects for a sampler whose probabilities differ
            from the trainer's; None for no correction.

    Source: spec §1, §5.
    """

    rollout: Rollout
    scores: Float[Tensor, " batch"]
    old_logprobs: Float[Tensor, "batch time"]
    ref_logprobs: Float[Tensor, "batch time"] | None
    values: Float[Tensor, "batch time"] | None
    rewards: Float[Tensor, "batch time"]
    reward_mask: Bool[Tensor, "batch time"]
    advantages: Float[Tensor, "batch time"]
    returns: Float[Tensor, "batch time"]
    token_scores: Float[Tensor, "batch time"] | None = None
    importance_weights: Float[Tensor, "batch time"] | None = None

    @property
    def num_rows(self) -> int:
        """Responses."""
        return self.rollout.num_responses

    @property
    def action_mask(self) -> Bool[Tensor, "batch time"]:
        """See `Rollout`."""
        return self.rollout.action_mask

    @property
    def total_scores(self) -> Float[Tensor, " batch"]:
        """All that a response scored: its own score and those of its tokens."""
        return self.scores if self.token_scores is None else self.scores + self.token_scores.sum(-1)

    @property
    def kl(self) -> Float[Tensor, "batch time"]:
        """Log ratio of the policy over the reference per action, nats: the k1 estimate; 0 elsewhere.

        Its sum over a response estimates that response's KL divergence (`objective/kl` is the batch mean of the sums).
        Single entries may be negative. All zero without a reference.
        """
        reference = self.old_logprobs if self.ref_logprobs is None else self.ref_logprobs
        return torch.where(self.action_mask, self.old_logprobs - reference, 0.0)

    def select(self, rows: Int[Tensor, " selected"] | slice) -> Experience:
        """The experience of some rows, in the order of `rows`; the padded widths stay."""
        return Experience(
            rollout=self.rollout.select(rows),
            scores=self.scores[rows],
            old_logprobs=self.old_logprobs[rows],
            ref_logprobs=None if self.ref_logprobs is None else self.ref_logprobs[rows],
            values=None if self.values is None else self.values[rows],
            rewards=self.rewards[rows],
            reward_mask=self.reward_mask[rows],
            advantages=self.advantages[rows],
            returns=self.returns[rows],
            token_scores=None if self.token_scores is None else self.token_scores[rows],
            importance_weights=None if self.importance_weights is None else self.importance_weights[rows],
        )


@dataclass(frozen=True)
class PolicyOutputs:
    """What policy and critic give for the actions of some rows under the current weights, float32.

    Attributes:
        logprobs: log probability (nats) of each action at the sampling temperature; 0 elsewhere.
        entropy: entropy (nats) of the distribution that each action was drawn from; 0 elsewhere.
        values: the critic's value of the state before each action; 0 elsewhere, except for the slot after the last
            action where that is asked for. None without a critic.
    """

    logprobs: Float[Tensor, "batch time"]
    entropy: Float[Tensor, "batch time"]
    values: Float[Tensor, "batch time"] | None


def check_masks(rollout: Rollout) -> None:
    """Refuse a rollout whose masks break their contract.

    Raises:
        ShapeError: shapes differ, a row has no action, or an action is not read.
    """
    check_same_shape(response_ids=rollout.response_ids, token_mask=rollout.token_mask, action_mask=rollout.action_mask)
    empty, unread = ~rollout.action_mask.any(-1), (rollout.action_mask & ~rollout.token_mask).any(-1)
    broken = torch.stack([empty, unread])
    if broken.any():
        row = int(broken.any(0).int().argmax())
        fault = "has no action: an empty response" if empty[row] else "has an action that token_mask leaves out"
        raise ShapeError(f"row {row} of the rollout {fault}")
