"""Between a rollout and its experience: texts for the reward sources, and what becomes of their answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kedge.algorithm.experience import Rollout
from kedge.algorithm.shaping import penalize_missing_eos
from kedge.data import Prompt
from kedge.errors import UnscoredError
from kedge.rewards import Responses, ScoredTerms, WeightedReward

__all__ = ["ScoredRollout", "describe_responses", "score_rollout"]


@dataclass(frozen=True)
class ScoredRollout:
    """The responses that have a score.

    Attributes:
        rollout: Their rows.
        scores: One per row, after the penalty for a missing stop token.
        prompts: Their prompts as text.
        terms: What the reward sources said about all responses.
    """

    rollout: Rollout
    scores: Float[Tensor, " batch"]
    prompts: list[str]
    terms: ScoredTerms

    def metrics(self) -> dict[str, float]:
        """Each source's mean score, how often functions failed, and how many responses had no score."""
        unscored = float(sum(score is None for score in self.terms.scores))
        return {**self.terms.term_means(), **self.terms.failures, "reward/unscored": unscored}


def score_rollout(
    rollout: Rollout,
    prompts: Sequence[Prompt],
    reward: WeightedReward,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_new_tokens: int,
    missing_eos_score: float | None,
    missing_eos_mode: Literal["replace", "subtract"],
    seed: int = 0,
) -> ScoredRollout:
    """Ask the reward for a score per response; leave out the responses that get none.

    Args:
        rollout: What the policy did.
        prompts: The row's prompts, one per response.
        reward: Who scores.
        tokenizer: The policy's.
        max_new_tokens: Where responses are cut.
        missing_eos_score: Score of a response without the stop token; None leaves it alone.
        missing_eos_mode: Whether that replaces the score, or is subtracted from it.
        seed: For functions that draw random numbers.

    Raises:
        RewardError: The reward broke its contract.
        UnscoredError: No response has a score.
    """
    described = describe_responses(rollout, prompts, tokenizer, max_new_tokens=max_new_tokens, seed=seed)
    terms = reward.score_terms(described)
    rows = [row for row, score in enumerate(terms.scores) if score is not None]
    if not rows:
        raise UnscoredError(f"reward {reward.name!r} gave none of {len(terms.scores)} responses a score")
    if len(rows) < len(prompts):
        rollout = rollout.select(torch.tensor(rows, device=rollout.response_ids.device))
    scores = torch.tensor([terms.scores[row] for row in rows], dtype=torch.float32, device=rollout.response_ids.device)
    if missing_eos_score is not None:
        scores = penalize_missing_eos(scores, rollout.stopped, value=missing_eos_score, mode=missing_eos_mode)
    return ScoredRollout(rollout, scores, [prompts[row].text for row in rows], terms)


def describe_responses(
    rollout: Rollout,
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_new_tokens: int | None = None,
    seed: int = 0,
) -> Responses:
    """A rollout as the texts, ids and columns that reward sources are given."""
    prompt_ids = _unpadded(rollout.prompt_ids, rollout.prompt_mask)
    response_ids = _unpadded(rollout.response_ids, rollout.action_mask)
    stopped = rollout.stopped.tolist()
    # The stop token is no part of the text, even where it is not one of the tokenizer's special tokens.
    spoken = [ids[:-1] if ended else ids for ids, ended in zip(response_ids, stopped, strict=True)]
    names = {name: None for prompt in prompts for name in prompt.columns}
    return Responses(
        prompts=[prompt.text for prompt in prompts],
        completions=[_continuation(tokenizer, *ids) for ids in zip(prompt_ids, spoken, strict=True)],
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        stopped=stopped,
        columns={name: [prompt.columns.get(name) for prompt in prompts] for name in names},
        max_new_tokens=max_new_tokens,
        seed=seed,
    )


def _continuation(tokenizer: PreTrainedTokenizerBase, prompt_ids: list[int], response_ids: list[int]) -> str:
    """The response as text. Decoded behind its prompt: a text's first space is lost where it is decoded alone."""
    prompt = str(tokenizer.decode(prompt_ids, skip_special_tokens=True))
    whole = str(tokenizer.decode([*prompt_ids, *response_ids], skip_special_tokens=True))
    if whole.startswith(prompt):
        return whole[len(prompt) :]
    return str(tokenizer.decode(response_ids, skip_special_tokens=True))


def _unpadded(ids: Tensor, mask: Tensor) -> list[list[int]]:
    return [row[counted].tolist() for row, counted in zip(ids, mask, strict=True)]
