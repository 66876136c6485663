"""Rollouts, and the experience that the PPO epochs train on.

Both are frozen: the epochs only read them. Masks are True where a slot counts.

A response has two masks:

    token_mask   tokens that the models read; later tokens are conditioned on them
    action_mask  tokens that the policy chose and is trained on; only these have log probabilities, entropy, KL,
                 rewards, values and advantages

Every action is read: action_mask ⊆ token_mask. A token that is read but was not chosen (a tool's output, a user's turn)
changes the log probabilities of later tokens and nothing else. A slot in neither mask is padding and has no influence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from kedge.algorithm.logprobs import Mismatch, sampler_mismatch
from kedge.algorithm.masking import check_same_shape, unpadded
from kedge.algorithm.prefixes import Contexts, Pieces, prefix_tree, repeated_tokens
from kedge.algorithm.shaping import total_scores
from kedge_base.errors import ShapeError

ENDINGS = ("completed", "truncated", "max_turns", "max_tokens", "context_overflow", "timeout", "failed")
"""How an episode ended: the environment ended it, or cut it off; the limit of turns, or of tokens in the middle of a
turn; an answer that no longer fit; a call that timed out; a call that failed.
"""


@dataclass(frozen=True)
class Rollout:
    """Prompts and sampled responses, padded.

    Attributes:
        prompt_ids: token ids, left-padded.
        prompt_mask: True on prompt tokens.
        response_ids: token ids, right-padded, the stop token included.
        token_mask: True on response tokens that the models read.
        action_mask: True on response tokens that the policy chose; a subset of `token_mask`, at least one per row.
        logprobs: log probability (nats) of each action during sampling, at the sampling temperature; 0 elsewhere.
        stopped: True if the response ended with a stop token, False if it was cut at the length limit.
        group: number of the row's prompt; advantages compare the rows of one group. Unchanged when rows are dropped.
        policy_version: number of updates that the policy had completed when it sampled the row.
        values: the critic's value of the state before each action, 0 elsewhere; None unless the critic is a head on the
            policy's trunk, so that the engine computes it while sampling.
        rewards: the environment's reward for each action, 0 elsewhere, and NaN if it failed; None without an
            environment.
        cut_off: True for an episode that was truncated, so that its last state has a value; None without an
            environment.
        ending: how each episode ended, as a number of `ENDINGS`; None without an environment.
        calls: the number of tool calls in each episode, how many of them failed, and how many answers of the policy an
            agent changed; None without an environment.
        turn_starts: True at the first token of each turn of the policy; None if every response is one turn.
        parents: the slot of the token that was read before each token: the previous slot, or an earlier one if the
            policy read a new context that starts like an old one. −1 is the prompt's last token, −2 the one before it;
            −1 − P, for a prompt of P tokens, means that nothing was read before. None if no new context can be read.
        privileged_ids: token ids that only a separate critic reads, between prompt and response, padded. None for a
            critic that reads what the policy reads.
        privileged_mask: True on those tokens.

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
    rewards: Float[Tensor, "batch time"] | None = None
    cut_off: Bool[Tensor, " batch"] | None = None
    ending: Int[Tensor, " batch"] | None = None
    calls: Int[Tensor, "batch counts"] | None = None
    turn_starts: Bool[Tensor, "batch time"] | None = None
    parents: Int[Tensor, "batch time"] | None = None
    privileged_ids: Int[Tensor, "batch privileged"] | None = None
    privileged_mask: Bool[Tensor, "batch privileged"] | None = None

    @property
    def for_critic(self) -> Rollout:
        """The rows as a separate critic reads them: privileged tokens end the prompt."""
        if self.privileged_ids is None or self.privileged_mask is None:
            return self
        return replace(
            self,
            prompt_ids=torch.cat([self.prompt_ids, self.privileged_ids], dim=1),
            prompt_mask=torch.cat([self.prompt_mask, self.privileged_mask], dim=1),
            privileged_ids=None,
            privileged_mask=None,
        )

    @cached_property
    def num_responses(self) -> int:
        """Number of rows."""
        return self.response_ids.shape[0]

    @property
    def was_cut(self) -> Bool[Tensor, " batch"]:
        """True if the response has no stop token.

        An episode was cut if it was ended by anything other than the limit of turns: the environment, the context, a
        timeout, or the limit of tokens.
        """
        was_cut = ~self.stopped if self.cut_off is None else self.cut_off
        return was_cut if self.ending is None else was_cut | (self.ending == ENDINGS.index("max_tokens"))

    @cached_property
    def num_actions(self) -> int:
        """Number of actions in the batch: the divisor of a token mean."""
        return int(self.action_mask.sum())

    @cached_property
    def num_tokens(self) -> int:
        """Number of tokens in the batch that a model reads, including prompts."""
        return int(self.prompt_mask.sum() + self.token_mask.sum())

    @property
    def num_read_tokens(self) -> int:
        """`num_tokens`, counting tokens that several contexts of an episode share once per context."""
        return sum(map(len, self.contexts(self.action_mask).paths)) if self.branches else self.num_tokens

    @cached_property
    def row_lengths(self) -> list[int]:
        """Maximum number of tokens that a model reads in each row, including the prompt."""
        if self.branches:
            contexts = self.contexts(self.action_mask, privileged=True)
            by_row: list[list[int]] = [[] for _ in range(self.num_responses)]
            for path, row in enumerate(contexts.rows):
                by_row[row].append(path)
            return [
                sum(len(contexts.paths[path]) for path in paths)
                - repeated_tokens([contexts.pieces[path] for path in paths])
                for paths in by_row
            ]
        lengths = self.for_critic.prompt_mask.sum(-1) + self.token_mask.sum(-1)
        return cast("list[int]", lengths.tolist())  # pyright: ignore[reportUnknownMemberType]

    @cached_property
    def prompts(self) -> list[Pieces]:
        """Split each row's prompt into the pieces that rows of a pass share, across groups."""
        texts = [tuple(ids) for ids in unpadded(self.prompt_ids, self.prompt_mask)]
        return prefix_tree(texts, longest=max(self.row_lengths, default=0))

    def shared_prompts(self, limit: float) -> list[Pieces] | None:
        """Return the prompts for passes in which rows share them; None if a row exceeds the length limit."""
        return self.prompts if max(self.row_lengths, default=0) <= limit else None

    @cached_property
    def num_distinct_tokens(self) -> int:
        """Count the tokens of all rows, counting shared tokens once."""
        if self.branches:
            contexts = self.contexts(self.action_mask)
            return sum(map(len, contexts.paths)) - repeated_tokens(contexts.pieces)
        return self.num_tokens - repeated_tokens(self.prompts)

    @cached_property
    def response_lengths(self) -> Int[Tensor, " batch"]:
        """Number of actions per response."""
        return self.action_mask.sum(-1)

    @cached_property
    def branches(self) -> bool:
        """True if some token does not follow the token in the slot before it."""
        if self.parents is None:
            return False
        slots = torch.arange(self.parents.shape[1], device=self.parents.device)
        return bool(((self.parents != slots - 1) & self.token_mask).any())

    def contexts(self, slots: Bool[Tensor, "batch time"], *, privileged: bool = False) -> Contexts:
        """Collect what was read before some slots of episodes.

        Args:
            slots: Actions, or slots that follow the previous slot.
            privileged: Insert each row's privileged tokens after a context's part of the prompt.
        """
        assert self.parents is not None
        contexts = Contexts([], [], [])
        prompts = unpadded(self.prompt_ids, self.prompt_mask)
        added: list[list[int]] = [[] for _ in prompts]
        if privileged and self.privileged_ids is not None and self.privileged_mask is not None:
            added = unpadded(self.privileged_ids, self.privileged_mask)
        tables = (self.response_ids, self.parents, self.action_mask, slots)
        rows = zip(prompts, added, *(cast("Any", table).tolist() for table in tables), strict=True)
        for row, (prompt, more, ids, parents, own, asked) in enumerate(rows):
            ends = [parents[slot] if own[slot] else slot - 1 for slot, asks in enumerate(asked) if asks]
            contexts.add(row, prompt, ids, parents, ends, more)
        return contexts

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by field, without missing optional ones."""
        return _tensors(self)

    def to(self, device: torch.device) -> Rollout:
        """Move the tensors to a device."""
        moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in self.tensors().items()}
        return replace(self, **moved)

    def select(self, rows: Int[Tensor, " selected"] | slice) -> Rollout:
        """Select rows, in the order of `rows`; padded widths and group numbers are unchanged."""
        return replace(self, **_selected(self, rows))


@dataclass(frozen=True)
class Experience:
    """A rollout with scores, reference log probabilities, values, rewards, advantages and returns.

    Attributes:
        rollout: the sampled responses.
        scores: one number per response, from the reward source; includes the penalty for a missing stop token, excludes
            the KL penalty.
        token_scores: one number per action, from a process reward, in addition to `scores`; 0 elsewhere. None if no
            source scores tokens.
        old_logprobs: log probabilities (nats) that are the denominator of the PPO ratio: the trainer's, under the
            weights at the start of the epochs, or the sampler's, `rollout.logprobs`. Equal if the two agree.
        ref_logprobs: log probabilities of the same actions under the frozen reference, at the same temperature; None
            without a reference model.
        values: the critic's value of the state before each action; None without a critic.
        rewards: one number per action: the score at its slot, minus the KL penalty if it is part of the reward; with
            credit by turn, the sum over each turn, at its first token.
        reward_mask: True where rewards, values and returns count: the actions, or with credit by turn the first token
            of each turn, and one more slot if the score comes after the last one.
        advantages: each token's weight in the policy loss, whitened if configured.
        returns: the critic's targets, always from unwhitened advantages.
        importance_weights: factor of each action's policy loss, to correct for a sampler whose probabilities differ
            from the trainer's; None for no correction.
        positive: True for a response whose score is high enough to imitate it; None for no imitation.
        recomputed_logprobs: the trainer's, if the old ones are the sampler's; else None.
        evaluated: True for a response that policy and reference were evaluated on, at random; the others are not
            trained on, and have the sampler's log probabilities instead of the reference's and the trainer's. None if
            all were.
        action_mask: see `Rollout`.

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
    positive: Bool[Tensor, " batch"] | None = None
    recomputed_logprobs: Float[Tensor, "batch time"] | None = None
    evaluated: Bool[Tensor, " batch"] | None = None
    action_mask: Bool[Tensor, "batch time"] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "action_mask", self.rollout.action_mask)

    @cached_property
    def trainer_logprobs(self) -> Float[Tensor, "batch time"]:
        """Log probabilities (nats) that the trainer computes under the weights at the start of the epochs."""
        return self.old_logprobs if self.recomputed_logprobs is None else self.recomputed_logprobs

    @cached_property
    def mismatch(self) -> Mismatch:
        """How far the trainer's log probabilities are from the sampler's."""
        return sampler_mismatch(self.trainer_logprobs, self.rollout.logprobs, self.evaluated_mask)

    @cached_property
    def evaluated_mask(self) -> Bool[Tensor, "batch time"]:
        """The actions of the responses that were evaluated."""
        return self.action_mask if self.evaluated is None else self.action_mask & self.evaluated[:, None]

    @cached_property
    def total_scores(self) -> Float[Tensor, " batch"]:
        """Each response's score plus its tokens' scores."""
        return total_scores(self.scores, self.token_scores)

    @cached_property
    def kl(self) -> Float[Tensor, "batch time"]:
        """The k1 estimate: log ratio of policy to reference per action, nats; 0 elsewhere.

        The sum over a response estimates its KL divergence; `objective/kl` is the batch mean of these sums. Single
        entries can be negative. All zero without a reference.
        """
        reference = self.old_logprobs if self.ref_logprobs is None else self.ref_logprobs
        return torch.where(self.action_mask, self.old_logprobs - reference, 0.0)

    def select(self, rows: Int[Tensor, " selected"] | slice) -> Experience:
        """Select rows, in the order of `rows`; padded widths are unchanged."""
        return replace(self, rollout=self.rollout.select(rows), **_selected(self, rows))

    def with_advantages(self, advantages: Float[Tensor, "batch time"]) -> Experience:
        """Return the experience with other advantages."""
        return replace(self, advantages=advantages)


@dataclass(frozen=True)
class PolicyOutputs:
    """Outputs of policy and critic for the actions of some rows, under the current weights, in float32.

    Attributes:
        logprobs: log probability (nats) of each action at the sampling temperature; 0 elsewhere.
        entropy: entropy (nats) of the distribution that each action was drawn from; 0 elsewhere.
        values: the critic's value of the state before each action, and of the state after the last one if requested;
            0 elsewhere. None without a critic.
        value_logits: the critic's histogram at the same slots, of which `values` are the expectations; None for a
            critic with a scalar output.
        kl: KL(π_old‖π) of the distribution at each action, nats, from the policy at the start of the epochs to the
            current one; 0 elsewhere. None for a policy that keeps only the probabilities of its actions, so that the KL
            is estimated from them.
        states: the hidden state of each slot, row by row; None unless the critic is a read-out of them.
    """

    logprobs: Float[Tensor, "batch time"]
    entropy: Float[Tensor, "batch time"]
    values: Float[Tensor, "batch time"] | None
    value_logits: Float[Tensor, "batch time bins"] | None = None
    kl: Float[Tensor, "batch time"] | None = None
    states: Float[Tensor, "slots dim"] | None = None


@dataclass(frozen=True)
class CriticOutputs:
    """Outputs of the critic alone for the actions of some rows, under the current weights, in float32.

    Attributes:
        values: see `PolicyOutputs`.
        value_logits: see `PolicyOutputs`.
    """

    values: Float[Tensor, "batch time"]
    value_logits: Float[Tensor, "batch time bins"] | None = None


def check_masks(rollout: Rollout) -> None:
    """Reject a rollout with invalid masks.

    Raises:
        ShapeError: shapes differ, a row has no action, or an action is not read.
    """
    check_same_shape(response_ids=rollout.response_ids, token_mask=rollout.token_mask, action_mask=rollout.action_mask)
    empty = ~rollout.action_mask.any(-1)
    unread = (rollout.action_mask & ~rollout.token_mask).any(-1)
    broken = torch.stack([empty, unread])
    if broken.any():
        row = int(broken.any(0).int().argmax())
        fault = "has no action: an empty response" if empty[row] else "has an action outside token_mask"
        raise ShapeError(f"row {row} of the rollout {fault}")


def _tensors(batch: Rollout | Experience) -> dict[str, Tensor]:
    """The tensors of a batch, by field."""
    entries = {each.name: getattr(batch, each.name) for each in fields(batch) if each.init}
    return {name: entry for name, entry in entries.items() if isinstance(entry, Tensor)}


def _selected(batch: Rollout | Experience, rows: Tensor | slice) -> dict[str, Any]:
    """Select rows of every tensor of a batch, by field."""
    return {name: tensor[rows] for name, tensor in _tensors(batch).items()}


def join_rollouts(parts: Sequence[Rollout], *, pad_id: int) -> Rollout:
    """Concatenate the rows of all parts, padded to the widest; a single part is returned unchanged.

    An optional tensor that a part lacks is dropped.

    Args:
        parts: at least one. Group numbers are kept, so different groups need different numbers.
        pad_id: token id of the additional slots.
    """
    if len(parts) == 1:
        return parts[0]

    joined: dict[str, Tensor] = {}
    for name in (each.name for each in fields(Rollout)):
        tensors = [getattr(part, name) for part in parts]
        if any(tensor is None for tensor in tensors):
            continue
        if tensors[0].ndim == 1:
            joined[name] = torch.cat(tensors)
        else:
            fill = pad_id if name.endswith("_ids") else 0
            joined[name] = join_rows(tensors, fill=fill, left=name.startswith("prompt_"))
    return Rollout(**joined)


def join_rows(parts: Sequence[Tensor], *, fill: float = 0, left: bool = False) -> Tensor:
    """Concatenate rows of several widths into one tensor.

    Args:
        parts: shaped `[rows, width]`.
        fill: content of the additional slots.
        left: pad on the left, as in prompts.
    """
    width = max(part.shape[1] for part in parts)
    missing = [width - part.shape[1] for part in parts]
    sides = [(count, 0) if left else (0, count) for count in missing]
    return torch.cat([pad(part, side, value=fill) for part, side in zip(parts, sides, strict=True)])
