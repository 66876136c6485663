"""Scores a rollout: texts for the reward sources, and their scores as tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean, pstdev
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kedge.algorithm.experience import Rollout, join_rollouts, join_rows
from kedge.algorithm.masking import unpadded
from kedge.algorithm.shaping import MissingEosMode, penalize_missing_eos, total_scores
from kedge.data import Prompt, Rendered
from kedge.data.turns import opened_conversation
from kedge.rewards import MESSAGES_COLUMN, Responses, ScoredTerms, WeightedReward
from kedge.rewards.source import chosen
from kedge_base.errors import UnscoredError
from kedge_base.texts import counted


@dataclass(frozen=True)
class ScoredRollout:
    """The responses that have a score.

    Attributes:
        rollout: Their rows.
        scores: The per-response numbers, after the penalty for a missing stop token.
        token_scores: The per-token numbers at the actions, 0 elsewhere; None where no source returned any.
        prompts: Their prompts as text.
        terms: The reward sources' scores of all responses, including those without a score.
        baseline: The total score of the greedy response to each row's prompt; None if not needed.
        reasons: The reason for each row's score, None for a row without one; None if no source gives reasons.
    """

    rollout: Rollout
    scores: Float[Tensor, " batch"]
    token_scores: Float[Tensor, "batch time"] | None
    prompts: list[str]
    terms: ScoredTerms
    baseline: Float[Tensor, " batch"] | None = None
    reasons: list[str | None] | None = None

    @cached_property
    def total_scores(self) -> Float[Tensor, " batch"]:
        """Each response's score plus its tokens' scores."""
        return total_scores(self.scores, self.token_scores)

    def renumbered(self, first_group: int) -> ScoredRollout:
        """Add `first_group` to the groups' numbers."""
        return replace(self, rollout=replace(self.rollout, group=self.rollout.group + first_group))

    def select(self, rows: Sequence[int]) -> ScoredRollout:
        """Select responses, in the order of `rows`; the terms remain those of all responses."""
        index = torch.tensor(rows, device=self.scores.device)
        return replace(
            self,
            rollout=self.rollout.select(index),
            scores=self.scores[index],
            token_scores=None if self.token_scores is None else self.token_scores[index],
            prompts=chosen(self.prompts, rows),
            baseline=None if self.baseline is None else self.baseline[index],
            reasons=chosen(self.reasons, rows),
        )

    def compared_with(self, greedy: ScoredRollout) -> ScoredRollout:
        """Keep the responses to prompts with a scored greedy response, whose score becomes their baseline.

        Args:
            greedy: At most one response per prompt, with the same group numbers.

        Raises:
            UnscoredError: No row is left.
        """
        known = dict(zip(greedy.rollout.group.tolist(), greedy.total_scores.tolist(), strict=True))
        groups = self.rollout.group.tolist()
        rows = [row for row, group in enumerate(groups) if group in known]
        terms = self.terms.with_failures(greedy.terms.failures)
        if not rows:
            raise UnscoredError(
                "no response has a score together with the greedy response to its prompt", terms.failures
            )
        baseline = torch.tensor([known.get(group, 0.0) for group in groups], device=self.scores.device)
        compared = replace(self, baseline=baseline, terms=terms)
        return compared if len(rows) == len(groups) else compared.select(rows)

    def metrics(self) -> dict[str, float]:
        """Compute each source's mean score and shares of reasons, functions' failed calls, and the mean of the
        baseline, if any.
        """
        baseline = {} if self.baseline is None else {"reward/greedy_mean": float(self.baseline.mean())}
        return {**self.terms.metrics(), **self.terms.failures, **baseline}


def join_scored(parts: Sequence[ScoredRollout], *, pad_id: int) -> ScoredRollout:
    """Join the responses of several batches, in order; a single batch is unchanged.

    Args:
        parts: At least one batch, all scored by the same sources; different groups have different numbers.
        pad_id: Token id for padding.
    """
    if len(parts) == 1:
        return parts[0]
    baselines = [part.baseline for part in parts if part.baseline is not None]
    token_scores = [
        torch.zeros_like(part.rollout.logprobs) if part.token_scores is None else part.token_scores for part in parts
    ]
    return ScoredRollout(
        rollout=join_rollouts([part.rollout for part in parts], pad_id=pad_id),
        scores=torch.cat([part.scores for part in parts]),
        token_scores=None if all(part.token_scores is None for part in parts) else join_rows(token_scores),
        prompts=[prompt for part in parts for prompt in part.prompts],
        terms=ScoredTerms.joined([part.terms for part in parts]),
        baseline=torch.cat(baselines) if len(baselines) == len(parts) else None,
        reasons=None
        if all(part.reasons is None for part in parts)
        else [each for part in parts for each in part.reasons or [None] * part.rollout.num_responses],
    )


def score_rollout(
    rollout: Rollout,
    prompts: Sequence[Prompt],
    reward: WeightedReward,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_new_tokens: int,
    missing_eos: MissingEos | None = None,
    seed: int = 0,
    stop_tokens: Collection[int] = (),
) -> ScoredRollout:
    """Score the responses of a rollout, and drop those without a score.

    Args:
        rollout: The sampled responses.
        prompts: The prompts, one per response.
        reward: Scores the responses.
        tokenizer: The policy's.
        max_new_tokens: The response length limit.
        missing_eos: The penalty for responses without a stop token; None for no penalty. Token scores are kept.
        seed: For functions that draw random numbers.
        stop_tokens: See `describe_responses`.

    Raises:
        RewardError: A reward source failed or returned something other than scores.
        UnscoredError: No response has a score.
    """
    described = describe_responses(
        rollout, prompts, tokenizer, max_new_tokens=max_new_tokens, seed=seed, stop_tokens=stop_tokens
    )
    terms = reward.score_terms(described)
    rows = [row for row, score in enumerate(terms.scores) if score is not None]
    if not rows:
        raise UnscoredError(
            f"reward {reward.name!r} scored none of {counted(len(terms.scores), 'response')}", terms.failures
        )
    if len(rows) < len(prompts):
        rollout = rollout.select(torch.tensor(rows, device=rollout.response_ids.device))
    scores = torch.tensor([terms.scores[row] for row in rows], dtype=torch.float32, device=rollout.response_ids.device)
    if missing_eos is not None:
        scores = missing_eos.penalize(scores, ~rollout.was_cut)
    token_scores = None
    if terms.token_scores is not None:
        token_scores = _at_actions([terms.token_scores[row] for row in rows], rollout)
    reasons = [terms.reason(row) for row in rows] if terms.reasons else None
    texts = [str(prompts[row].text) for row in rows]  # a checkpoint stores plain texts
    return ScoredRollout(rollout, scores, token_scores, texts, terms, reasons=reasons)


def describe_responses(
    rollout: Rollout,
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_new_tokens: int | None = None,
    seed: int = 0,
    stop_tokens: Collection[int] = (),
) -> Responses:
    """Describe a rollout by the texts, ids and columns that reward sources read.

    Args:
        rollout: The sampled responses.
        prompts: The prompts, one per response.
        tokenizer: The policy's.
        max_new_tokens: See `Responses`.
        seed: See `Responses`.
        stop_tokens: Tokens that end a turn, besides those that ended a response of the rollout.
    """
    prompt_ids = unpadded(rollout.prompt_ids, rollout.prompt_mask)
    response_ids = unpadded(rollout.response_ids, rollout.token_mask)
    stopped = rollout.stopped.tolist()
    # The stop token is not part of the text, even if it is not one of the tokenizer's special tokens.
    text_ids = [ids[:-1] if ended else ids for ids, ended in zip(response_ids, stopped, strict=True)]
    names = {name: None for prompt in prompts for name in prompt.columns}
    columns = {name: [prompt.columns.get(name) for prompt in prompts] for name in names}
    texts = [prompt.text for prompt in prompts]
    is_played = rollout.rewards is not None or rollout.parents is not None
    if is_played:  # an episode may have opened with more than its prompt
        texts = [str(tokenizer.decode(ids)) for ids in prompt_ids]
        if MESSAGES_COLUMN in columns:
            columns[MESSAGES_COLUMN] = _conversations(prompts, texts, tokenizer)
    turns: list[list[dict[str, str]]] = []
    if is_played or not torch.equal(rollout.token_mask, rollout.action_mask):
        own = unpadded(rollout.action_mask, rollout.token_mask)
        stops = {*stop_tokens, *(ids[-1] for ids, ended in zip(response_ids, stopped, strict=True) if ended)}
        starts = torch.zeros_like(rollout.token_mask) if rollout.turn_starts is None else rollout.turn_starts
        read: Sequence[Mapping[int, list[int]]] = _new_contexts(rollout) if rollout.branches else [{}] * len(own)
        rows = zip(response_ids, own, starts.tolist(), read, strict=True)
        turns = [_turns(tokenizer, *row, stops) for row in rows]
    return Responses(
        prompts=texts,
        completions=[continuation(tokenizer, *ids) for ids in zip(prompt_ids, text_ids, strict=True)],
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        stopped=stopped,
        columns=columns,
        max_new_tokens=max_new_tokens,
        seed=seed,
        paid=[] if rollout.rewards is None else unpadded(rollout.rewards, rollout.token_mask),
        turns=turns,
        preceding=[*map(_before_last, texts, turns)] if turns else texts,
    )


_BEFORE = 16
"""Tokens before a response or turn that are decoded with it: more than the parts of a character."""


def _turns(
    tokenizer: PreTrainedTokenizerBase,
    ids: list[int],
    own: Sequence[bool],
    starts: Sequence[bool],
    contexts: Mapping[int, list[int]],
    stops: Collection[int],
) -> list[dict[str, str]]:
    """Split a response into messages: the policy's turns, without their stop tokens, and what it read in between.

    Args:
        tokenizer: The policy's.
        ids: The response.
        own: True for the policy's tokens.
        starts: True where a turn of the policy starts, if that is known.
        contexts: The whole context of each turn that has read a new one, by the index of the turn's first token.
        stops: The tokens that end a turn.
    """
    turns: list[dict[str, str]] = []
    start = 0
    for end in range(1, len(ids) + 1):
        has_stopped = own[end - 1] and ids[end - 1] in stops  # the policy's next turn may follow immediately
        if has_stopped or end == len(ids) or own[end] != own[end - 1] or starts[end]:
            text = continuation(tokenizer, ids[:start], ids[start : end - has_stopped])
            if own[start] or end not in contexts:
                turns.append({"role": "assistant" if own[start] else "environment", "content": text})
            if end in contexts:
                turns.append({"role": "environment", "content": str(tokenizer.decode(contexts[end]))})
            start = end
    return turns


def _new_contexts(rollout: Rollout) -> list[dict[int, list[int]]]:
    """Collect the contexts of turns that do not continue the turn before them, by the slot of their first token."""
    assert rollout.turn_starts is not None
    assert rollout.parents is not None
    contexts = rollout.contexts(rollout.turn_starts)
    states = iter(contexts.states)
    found: list[dict[int, list[int]]] = []
    for starts, parents in zip(rollout.turn_starts.tolist(), rollout.parents.tolist(), strict=True):
        new: dict[int, list[int]] = {}
        jumps = [slot for slot, parent in enumerate(parents) if parent != slot - 1]
        before = 0
        for slot in (slot for slot, is_start in enumerate(starts) if is_start):
            path, place = next(states)
            if any(before < jump <= slot for jump in jumps):
                new[slot] = contexts.paths[path][: place + 1]
            before = slot
        found.append(new)
    return found


def _before_last(prompt: str, turns: Sequence[Mapping[str, str]]) -> str:
    """Return the text right before the policy's last turn."""
    texts = [prompt, *(turn["content"] for turn in turns)]
    return texts[max((place for place, turn in enumerate(turns) if turn["role"] == "assistant"), default=0)]


def _conversations(prompts: Sequence[Prompt], texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    """The column `messages` of episodes with these initial texts, for models with another template."""
    found: dict[tuple[int, str], Any] = {}  # the responses to a prompt share their opening
    for prompt, text in zip(prompts, texts, strict=True):
        messages: Any = prompt.columns.get(MESSAGES_COLUMN)
        if messages and isinstance(prompt.text, Rendered) and text != prompt.text and (id(prompt), text) not in found:
            found[id(prompt), text] = opened_conversation(tokenizer, messages, text)
        found.setdefault((id(prompt), text), messages)
    return [found[id(prompt), text] for prompt, text in zip(prompts, texts, strict=True)]


def continuation(tokenizer: PreTrainedTokenizerBase, prompt_ids: list[int], response_ids: list[int]) -> str:
    """Decode a response together with the end of its prompt, since on its own it would lose its leading space.

    Special tokens are part of the text, such as a `<think>` that a reward function looks for.
    """
    text = ""
    for before in (prompt_ids[-_BEFORE:], prompt_ids):
        prompt = str(tokenizer.decode(before))
        whole = str(tokenizer.decode([*before, *response_ids]))
        text = whole[len(prompt) :] if whole.startswith(prompt) else str(tokenizer.decode(response_ids))
        if "\ufffd" not in text:  # the window may have cut into a multi-byte character
            break
    return text


def _at_actions(rows: Sequence[Sequence[float] | None], rollout: Rollout) -> Float[Tensor, "batch time"]:
    """Put each number at its token; a number for a token that was only read, such as a tool's, goes to the policy's
    last token before it.

    All other slots, and rows without numbers, are 0.
    """
    scores = torch.zeros_like(rollout.logprobs)
    slots = torch.arange(scores.shape[1], device=scores.device)
    before = torch.where(rollout.action_mask, slots, 0).cummax(1).values
    for index, row in enumerate(rows):
        if row is not None:
            places = before[index, rollout.token_mask[index]]
            scores[index].index_add_(0, places, torch.tensor(row, dtype=scores.dtype, device=scores.device))
    return torch.where(rollout.action_mask, scores, 0.0)


PUBLISHED = -1.0
"""The score in Stiennon and N+, where reward models have mean 0."""


@dataclass
class MissingEos:
    """Penalizes responses without a stop token.

    `auto` is set by the first batch of scores and then fixed: it is −1, or lower if scores as low as −1 are common, so
    that a response gains nothing by not stopping.

        replace: min(−1, mean − std)   subtract: min(−1, −std)

    The mean is over the responses that stopped (over all if none did), since those are the alternative; the standard
    deviation is over all responses, because few may have stopped.

    Attributes:
        score: The score or the amount to subtract; None for no penalty.
        mode: Whether it replaces the score, or its absolute value is subtracted.

    Source: spec §4.16; −1 is N+'s, one standard deviation below the mean of normalized scores.
    """

    score: float | Literal["auto"] | None
    mode: MissingEosMode = "replace"

    def penalize(self, scores: Float[Tensor, " batch"], stopped: Bool[Tensor, " batch"]) -> Float[Tensor, " batch"]:
        """Apply the penalty to scores; the first call sets an `auto` score."""
        if self.score == "auto":
            self.score = self._automatic(scores.tolist(), stopped.tolist())
        return scores if self.score is None else penalize_missing_eos(scores, stopped, value=self.score, mode=self.mode)

    def _automatic(self, scores: list[float], stopped: list[bool]) -> float:
        finished = [score for score, ended in zip(scores, stopped, strict=True) if ended]
        center = fmean(finished or scores) if self.mode == "replace" else 0.0
        return min(PUBLISHED, center - pstdev(scores))

    @property
    def is_known(self) -> bool:
        """True if the penalty is known; `auto` is unknown until the first scores."""
        return self.score != "auto"

    def metrics(self) -> dict[str, float]:
        """`reward/missing_eos_score`, if there is a penalty: the score, or, with `subtract`, the number added to it."""
        if self.score is None or self.score == "auto":
            return {}
        return {"reward/missing_eos_score": self.score if self.mode == "replace" else -abs(self.score)}

    def state_dict(self) -> dict[str, float | str | None]:
        """The score."""
        return {"score": self.score}

    def load_state_dict(self, state: Mapping[str, float | Literal["auto"] | None]) -> None:
        """Restore a `state_dict`."""
        self.score = state["score"]
