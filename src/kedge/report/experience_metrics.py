"""What a batch of experience says about a run, as figures and as samples to read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kedge.algorithm.critic import explained_variance
from kedge.algorithm.experience import Experience
from kedge.report.samples import Sample

__all__ = ["describe_experience", "describe_samples"]


def describe_experience(experience: Experience) -> dict[str, float]:
    """The figures of one update's responses, all of them over counted tokens only (spec §10).

    `objective/kl`: KL to the reference, summed over each response, batch mean, nats; absent without a reference.
    `reward/kl`: what that costs in
    units of the score; `reward/total`: the score less that cost, per response. `policy/sampler_ratio_max`: the largest
    ratio, either way, between a token's probability as the trainer sees it and as it was when it was sampled.
    """
    rollout, mask = experience.rollout, experience.rollout.response_mask
    lengths = rollout.response_lengths.float()
    disagreement = (experience.old_logprobs - rollout.logprobs)[mask].abs().max()
    totals = torch.where(experience.reward_mask, experience.rewards, 0.0).sum(-1)
    metrics = {
        **({} if experience.ref_logprobs is None else {"objective/kl": experience.kl.sum(-1).mean()}),
        "policy/sampler_ratio_max": disagreement.exp(),
        "objective/logprobs": torch.where(mask, experience.old_logprobs, 0.0).sum(-1).mean(),
        "reward/score_mean": experience.scores.mean(),
        "reward/score_std": experience.scores.std(correction=0),
        "reward/total": totals.mean(),
        "reward/kl": (experience.scores - totals).mean(),
        "response/length": lengths.mean(),
        "response/length_max": lengths.max(),
        "response/eos_rate": rollout.stopped.float().mean(),
        "value/mean": experience.values[experience.reward_mask].mean(),
        "value/returns_mean": experience.returns[experience.reward_mask].mean(),
        "value/explained_variance": explained_variance(experience.values, experience.returns, experience.reward_mask),
    }
    return {name: float(value) for name, value in metrics.items()}


def describe_samples(
    experience: Experience, prompts: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, count: int
) -> list[Sample]:
    """The first `count` responses with the figures of each of their tokens."""
    return [_sample(experience, row, prompts[row], tokenizer) for row in range(min(count, len(prompts)))]


def _sample(experience: Experience, row: int, prompt: str, tokenizer: PreTrainedTokenizerBase) -> Sample:
    mask = experience.rollout.response_mask[row]

    def counted(figures: Tensor) -> list[float]:
        return figures[row][mask].tolist()

    ids = experience.rollout.response_ids[row][mask].tolist()
    return Sample(
        prompt=prompt,
        response=str(tokenizer.decode(ids, skip_special_tokens=True)),
        tokens=[str(tokenizer.decode([token])) for token in ids],
        score=float(experience.scores[row]),
        stopped=bool(experience.rollout.stopped[row]),
        logprobs=counted(experience.old_logprobs),
        ref_logprobs=None if experience.ref_logprobs is None else counted(experience.ref_logprobs),
        values=counted(experience.values),
        rewards=counted(experience.rewards),
        advantages=counted(experience.advantages),
    )
