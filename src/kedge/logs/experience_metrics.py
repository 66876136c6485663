"""Metrics, distributions and samples of a batch of experience."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, compress, starmap
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kedge.algorithm.critic import explained_variance
from kedge.algorithm.experience import ENDINGS, Experience, Rollout
from kedge.algorithm.logprobs import response_log_ratios
from kedge.algorithm.policy_losses import MAX_LOG_RATIO
from kedge.algorithm.shaping import GroupScores
from kedge.data.tokens import turn_pieces
from kedge.logs.json_lines import Sample
from kedge_base.run_folder.record_format import NUM_BINS, OF_SCORES, WIDEST

NUM_QUANTILES = 21

GRAM = 4
"""Length of the sequences that count as repeated; shorter ones also recur in good prose."""
HASH = 1_000_003

PERCENTS = (1, 50, 99)
"""The quantiles of the ratios between trainer and sampler."""

SMALL = 0.1
"""A group's standard deviation counts as small below this share of the pooled one within groups: dividing by it would
inflate differences tenfold.
"""


def describe_experience(experience: Experience, *, is_exact: bool = True) -> dict[str, float]:
    """Metrics of one update's responses, over counted tokens only (spec §10).

    `objective/kl`: KL to the reference, summed over each response, batch mean, nats; absent without a reference.
    `reward/kl`: its cost in units of the score; `reward/total`: the score minus that cost, per response. Whitening the
    rewards keeps their sum, hence both; `value/…` and `advantage/…` are then in units of the whitened rewards.
    `policy/sampler_ratio_max`: the largest ratio, in either direction, between a token's probability as recomputed by
    the trainer and as sampled. Only where the sampler is not exact: `policy/sampler_k3` and `policy/sampler_share`, k3
    in nats per token and the effective share of the tokens, see `Mismatch`; `policy/sampler_ratio_pNN` and
    `policy/sampler_response_pNN`, quantiles of the raw ratio of tokens, and of its geometric means over responses.
    `advantage/…`: returns − values, the advantages before any whitening unless the returns have their own λ.

    Args:
        experience: The update's experience.
        is_exact: Whether the sampler's log probabilities equal the trainer's.
    """
    rollout = experience.rollout
    mask = experience.action_mask
    scores = experience.total_scores
    evaluated = slice(None) if experience.evaluated is None else experience.evaluated
    apart = experience.mismatch
    totals = torch.where(experience.reward_mask, experience.rewards, 0.0).sum(-1)
    metrics = {
        **({} if experience.ref_logprobs is None else {"objective/kl": experience.kl[evaluated].sum(-1).mean()}),
        "policy/sampler_ratio_max": apart.largest_ratio,
        **({} if is_exact else {"policy/sampler_k3": apart.k3, "policy/sampler_share": apart.effective_share}),
        **({} if is_exact else _describe_ratios(experience)),
        "objective/logprobs": torch.where(mask, experience.old_logprobs, 0.0).sum(-1).mean(),
        "reward/total": totals.mean(),
        "reward/kl": (scores - totals).mean(),
        **({} if experience.positive is None else {"reward/positive_share": experience.positive.float().mean()}),
        **({} if experience.values is None else _describe_critic(experience, experience.values)),
    }
    return describe_responses(rollout, scores) | {name: float(value) for name, value in metrics.items()}


def describe_truncation(experience: Experience) -> dict[str, float]:
    """`policy/sampler_truncated`: the share of tokens with a truncated importance weight; absent without weights."""
    if (weights := experience.importance_weights) is None:
        return {}
    ratios = (experience.old_logprobs - experience.rollout.logprobs).exp()
    truncated = (ratios > weights) & (weights > 0)
    return {"policy/sampler_truncated": float(truncated[experience.evaluated_mask].float().mean())}


def describe_masked(experience: Experience) -> dict[str, float]:
    """`policy/sampler_masked`: the share of tokens whose importance weight is masked because of their ratio."""
    weights = experience.importance_weights
    assert weights is not None, "a mask makes weights"
    return {"policy/sampler_masked": float((weights == 0)[experience.evaluated_mask].float().mean())}


def _describe_ratios(experience: Experience) -> dict[str, float]:
    mask = experience.evaluated_mask
    log_ratio = experience.trainer_logprobs - experience.rollout.logprobs
    parts = {"ratio": log_ratio[mask], "response": response_log_ratios(log_ratio, mask)[mask.any(-1)]}
    return {
        f"policy/sampler_{name}_p{percent:02}": float(ordered[round(percent / 100 * (len(ordered) - 1))].exp())
        for name, ordered in ((name, values.sort().values) for name, values in parts.items())
        for percent in PERCENTS
    }


def reference_error(experience: Experience) -> dict[str, float]:
    """`objective/reference_error`: mean |log π_old − log π_ref| of the actions, nats per token; absent without a KL.

    Before the first step, both are the same model, so it shows the effect of rounding on the KL. `…_max` is the
    largest.
    """
    if experience.ref_logprobs is None:
        return {}
    apart = (experience.old_logprobs - experience.ref_logprobs).abs()
    apart = apart[experience.evaluated_mask]
    return {
        "objective/reference_error": float(apart.mean()),
        "objective/reference_error_max": float(apart.max()),
    }


def describe_responses(rollout: Rollout, scores: Float[Tensor, " batch"]) -> dict[str, float]:
    """Metrics of responses and their scores, before models are evaluated on them.

    Args:
        rollout: The responses.
        scores: One per response, token scores included.
    """
    lengths = rollout.response_lengths.float()
    metrics = {
        "reward/score_mean": scores.mean(),
        "reward/score_std": scores.std(correction=0),
        "response/length": lengths.mean(),
        "response/length_max": lengths.max(),
        "response/eos_rate": rollout.stopped.float().mean(),
        "response/repetition": repetition(rollout.response_ids, rollout.action_mask).mean(),
        "reward/length_correlation": correlation(scores, lengths),
        "prompt/length": rollout.prompt_mask.sum(-1).float().mean(),
    }
    return {name: float(value) for name, value in metrics.items()}


def describe_lengths(rollout: Rollout, scores: Float[Tensor, " batch"]) -> dict[str, float]:
    """`response/length_right`, `response/length_wrong`: mean length of the responses with scores above 0, and of the
    others, if scores are verdicts.

    A mean over no responses is absent.

    Args:
        rollout: The responses.
        scores: One per response, token scores included.
    """
    lengths = rollout.response_lengths.float()
    kinds = {"response/length_right": lengths[scores > 0], "response/length_wrong": lengths[scores <= 0]}
    return {name: float(each.mean()) for name, each in kinds.items() if len(each)}


def without_scores(metrics: Mapping[str, float]) -> dict[str, float]:
    """Drop the metrics of scores and their spread, for a run without a reward."""
    return {name: value for name, value in metrics.items() if not name.startswith(OF_SCORES)}


def _describe_critic(experience: Experience, values: Tensor) -> dict[str, Tensor]:
    slots = experience.reward_mask
    counted = values[slots]
    returns = experience.returns[slots]
    advantages = returns - counted
    return {
        "advantage/mean": advantages.mean(),
        "advantage/std": advantages.std(correction=0),
        "value/mean": counted.mean(),
        "value/std": counted.std(correction=0),
        "value/returns_mean": returns.mean(),
        "value/returns_std": returns.std(correction=0),
        "value/explained_variance": explained_variance(values, experience.returns, slots),
    }


def describe_samples(
    experience: Experience,
    prompts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    count: int,
    entropies: Float[Tensor, "batch time"] | None = None,
    new_logprobs: Float[Tensor, "batch time"] | None = None,
    reasons: Sequence[str | None] | None = None,
    has_scores: bool = True,
) -> list[Sample]:
    """Describe the first `count` responses token by token: log probabilities, rewards, advantages and others.

    Args:
        experience: The experience trained on.
        prompts: The prompts as text, one per response; for an episode, the opening messages.
        tokenizer: The policy's tokenizer.
        count: Number of responses.
        entropies: Entropy of each token's distribution, nats; NaN where unknown.
        new_logprobs: Log probability of each token after the epochs, nats; NaN where unknown.
        reasons: The reason for each response's score; None if the rewards give none.
        has_scores: False for a run without a reward.
    """
    rollout = experience.rollout
    scores = experience.total_scores.tolist()

    def sample(row: int, prompt: str) -> Sample:
        mask = rollout.action_mask[row]

        def counted(values: Tensor) -> list[float]:
            return values[row][mask].tolist()

        def known(values: Tensor | None) -> list[float] | None:
            return None if values is None or values[row][mask].isnan().any() else counted(values)

        sides = sides_of(rollout, row, tokenizer)
        stopped = bool(rollout.stopped[row])
        if rollout.ending is not None or rollout.parents is not None:  # an episode may open with more than its prompt
            prompt = str(tokenizer.decode(rollout.prompt_ids[row][rollout.prompt_mask[row]]))
        is_evaluated = bool(experience.evaluated_mask[row].any())
        return Sample(
            prompt=prompt,
            response=str(tokenizer.decode(sides.ids[:-1] if stopped else sides.ids)),
            tokens=sides.tokens,
            score=scores[row] if has_scores else None,
            stopped=stopped,
            logprobs=counted(experience.old_logprobs),
            ref_logprobs=known(experience.ref_logprobs) if is_evaluated else None,
            values=known(experience.values),
            rewards=counted(experience.rewards),
            advantages=counted(experience.advantages),
            entropies=known(entropies),
            new_logprobs=known(new_logprobs),
            reason=reasons[row] if reasons else None,
            foreign=sides.foreign or None,
            turns=sides.turns or None,
            ending=None if rollout.ending is None else ENDINGS[int(rollout.ending[row])],
        )

    return list(starmap(sample, enumerate(prompts[:count])))


def repetition(response_ids: Int[Tensor, "batch time"], mask: Bool[Tensor, "batch time"]) -> Float[Tensor, " batch"]:
    """Share of a response's token 4-grams that occur earlier in the same turn; 0 if no turn has four tokens.

    Turns are separate because a game's moves and a tool's calls are naturally alike from turn to turn.

    Args:
        response_ids: Right-padded.
        mask: True on the policy's tokens; a turn is a contiguous stretch of them.
    """
    starts = mask & ~torch.nn.functional.pad(mask, (1, 0))[:, :-1]
    turns = torch.where(mask, starts.cumsum(-1), 0)
    inside = (turns[:, : -GRAM + 1] == turns[:, GRAM - 1 :]) & mask[:, GRAM - 1 :]
    num_grams = inside.sum(-1)
    if not num_grams.any():
        return num_grams.float()
    keys = turns[:, GRAM - 1 :]
    for shift in range(GRAM):
        # Overflow wraps around: two different 4-grams share a key with probability 2⁻⁶⁴.
        keys = keys * HASH + response_ids[:, shift : response_ids.shape[1] - GRAM + 1 + shift] + 1
    keys = torch.where(inside, keys, 0)
    ordered, order = keys.sort(dim=-1, stable=True)
    inside = inside.gather(1, order)
    again = (ordered[:, 1:] == ordered[:, :-1]) & inside[:, 1:] & inside[:, :-1]
    return again.sum(-1) / num_grams.clamp(min=1)


def correlation(first: Float[Tensor, " n"], second: Float[Tensor, " n"]) -> Float[Tensor, ""]:
    """Pearson correlation; 0 if either is constant."""
    centered = [values - values.mean() for values in (first, second)]
    norms = centered[0].norm() * centered[1].norm()
    return torch.where(norms > 0, (centered[0] * centered[1]).sum() / norms.clamp(min=1e-30), 0.0)


def describe_groups(groups: GroupScores, rollout: Rollout, scores: Float[Tensor, " batch"]) -> dict[str, float]:
    """Metrics of an update's groups; none if every response has its own prompt.

    `group/constant`: share of the groups with one score for all responses. `group/score_std`: standard deviation of
    the scores within their groups. `group/small_spread`: share of the groups with a spread above 0 and below a tenth of
    that. `group/length_above`, `group/length_below`: mean length of the responses that score above and below their
    group's mean.

    Args:
        groups: The `group_scores` of these.
        rollout: The responses.
        scores: One per response, token scores included.
    """
    if not (groups.count > 1).any():
        return {}
    within = float((groups.std.square() * groups.count).sum() / groups.count.sum()) ** 0.5
    found = groups.std[groups.has_spread]
    metrics = {
        "group/constant": 1 - float(groups.has_spread.double().mean()),
        "group/score_std": within,
        "group/small_spread": float((found < SMALL * within).double().mean()) if len(found) else 0.0,
    }
    if len(found):
        lengths = rollout.response_lengths.cpu().float()
        distance = scores.cpu() - groups.mean[groups.place]
        counted = groups.has_spread[groups.place]
        metrics |= {
            "group/length_above": float(lengths[counted & (distance > 0)].mean()),
            "group/length_below": float(lengths[counted & (distance < 0)].mean()),
        }
    return metrics


def describe_update(
    experience: Experience,
    passes: Sequence[Float[Tensor, "batch time"]],
    *,
    clip: tuple[float, float] | None,
    scores: Float[Tensor, " sampled"],
    lengths: Int[Tensor, " sampled"],
) -> dict[str, Any]:
    """Distributions of scores and lengths, and of the ratios in each epoch.

    `scores`, `lengths`: quantiles at 0, 5, …, 100 %. `epochs`, each: `approx_kl`, nats per token; `cases`, the shares
    of tokens that are raised or lowered (by the sign of the advantage), each split into clipped (`_held`) and not;
    `clip_fraction`, the sum of the clipped shares; `ratios`, token counts in 41 equal bins of log ρ from −1 to 1.

    Args:
        experience: The experience trained on.
        passes: Log probabilities under the policy in training, per epoch; NaN where a token was not visited.
        clip: ε below 1 and above; None if nothing is clipped.
        scores: Of all responses, trained on or not.
        lengths: The same, in tokens.

    Source: PPO figure 1.
    """
    return {
        "scores": _quantiles(scores),
        "lengths": _quantiles(lengths),
        "epochs": [_epoch(experience, logprobs, clip) for logprobs in passes],
    }


def _quantiles(values: Tensor) -> list[float]:
    at = torch.linspace(0, 1, NUM_QUANTILES, device=values.device)
    return [float(f"{each:.6g}") for each in torch.quantile(values.float(), at).tolist()]


def _epoch(experience: Experience, logprobs: Tensor, clip: tuple[float, float] | None) -> dict[str, Any]:
    seen = experience.rollout.action_mask & ~logprobs.isnan()
    log_ratio = (logprobs - experience.old_logprobs)[seen].clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    advantages = experience.advantages[seen]
    raised = advantages >= 0
    ratio = log_ratio.exp()
    count = max(1, log_ratio.numel())
    epoch: dict[str, Any] = {"approx_kl": float((log_ratio.expm1() - log_ratio).sum()) / count}
    if clip is not None:
        held = torch.where(raised, ratio > 1 + clip[1], ratio < 1 - clip[0]) & (advantages != 0)
        cases = {
            "raised": raised & ~held,
            "raised_held": raised & held,
            "lowered": ~raised & ~held,
            "lowered_held": ~raised & held,
        }
        shares = {name: int(tokens.sum()) / count for name, tokens in cases.items()}
        epoch |= {"clip_fraction": shares["raised_held"] + shares["lowered_held"], "cases": shares}
    return epoch | {"ratios": {"raised": _histogram(log_ratio[raised]), "lowered": _histogram(log_ratio[~raised])}}


def _histogram(log_ratio: Tensor) -> list[int]:
    bins = ((log_ratio + WIDEST) / (2 * WIDEST) * NUM_BINS).floor().long().clamp(0, NUM_BINS - 1)
    return torch.bincount(bins, minlength=NUM_BINS).tolist()


class Sides(NamedTuple):
    """A response as both sides wrote it.

    Attributes:
        ids: The tokens of both sides, in order.
        tokens: The text of each token of the policy.
        foreign: Each text that the policy only read, after the number of its tokens before it. A new context begins
            another text.
        turns: The turns of an episode, each with four numbers: the policy's tokens before it; those up to the last one
            that it has read, which are fewer in a new context; the tokens that it has read, including the prompt; and
            how many of these are new since the turn before. Empty for other responses.
    """

    ids: list[int]
    tokens: list[str]
    foreign: list[tuple[int, str]]
    turns: list[tuple[int, ...]]


def sides_of(rollout: Rollout, row: int, tokenizer: PreTrainedTokenizerBase) -> Sides:
    """Divide a response into what the policy chose and what it only read.

    Args:
        rollout: The responses.
        row: Index of the response.
        tokenizer: The policy's tokenizer.
    """
    columns = rollout.response_ids, rollout.action_mask, rollout.parents, rollout.turn_starts
    read = rollout.token_mask[row]
    ids, own, parents, starts = ([] if column is None else column[row][read].tolist() for column in columns)
    parents = parents or range(-1, len(ids) - 1)
    contexts = list(accumulate(parent != slot - 1 for slot, parent in enumerate(parents)))
    before = list(accumulate(own, initial=0))
    turns: list[tuple[int, ...]] = []
    for slot in compress(range(len(ids)), starts):
        path = [slot]
        while (place := parents[path[-1]]) >= 0:
            path.append(place)
        num_read = int(rollout.prompt_mask[row].sum()) + place + len(path)
        after = next((before[at + 1] for at in path[1:] if own[at]), 0)
        num_new = sum(before[at] == before[slot] for at in path[1:]) if turns else num_read
        turns.append((before[slot], after, num_read, num_new))
    return Sides(ids, *turn_pieces(tokenizer, ids, own, contexts), turns)
