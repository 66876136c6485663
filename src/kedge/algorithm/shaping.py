"""From scores to one reward per token."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kedge.algorithm.kl import KLEstimator, kl_estimate
from kedge.algorithm.masking import check_choice, check_counted, check_same_shape, keep_counted
from kedge.errors import ConfigError, ShapeError

__all__ = [
    "KLScope",
    "MissingEosMode",
    "ScoreAt",
    "ShapedRewards",
    "penalize_missing_eos",
    "shape_rewards",
    "total_scores",
]

ScoreAt = Literal["last", "after_last"]
KLScope = Literal["token", "sequence"]
MissingEosMode = Literal["replace", "subtract"]


class ShapedRewards(NamedTuple):
    """Rewards per token, and the mask of the slots that count."""

    rewards: Float[Tensor, "*batch time"]
    mask: Bool[Tensor, "*batch time"]


def total_scores(
    scores: Float[Tensor, "*batch"], token_scores: Float[Tensor, "*batch time"] | None
) -> Float[Tensor, "*batch"]:
    """Each response's score plus its tokens' scores, if any.

    Added in float64 and then rounded, so that the same numbers at other tokens give the same total: groups without
    spread are recognized by comparing totals.
    """
    if token_scores is None:
        return scores
    return (scores.double() + token_scores.double().sum(-1)).to(scores.dtype)


def penalize_missing_eos(
    scores: Float[Tensor, "*batch"],
    stopped: Bool[Tensor, "*batch"],
    *,
    value: float = -1.0,
    mode: MissingEosMode = "replace",
) -> Float[Tensor, "*batch"]:
    """Penalize responses without a stop token, so that the policy learns to stop.

    replace: score = value;   subtract: score − |value|

    Args:
        scores: one number per response.
        stopped: True where the response ended with a stop token; these scores are unchanged.
        value: the replacement score, or the amount to subtract (its sign is ignored).
        mode: `replace` or `subtract`.

    Raises:
        ShapeError: when the shapes differ.

    Source: S3 and N+ ("EOS trick", replace); spec §4.16.
    """
    check_same_shape(scores=scores, stopped=stopped)
    check_choice("mode", mode, MissingEosMode)
    return torch.where(stopped, scores, value if mode == "replace" else scores - abs(value))


@torch.no_grad()
def shape_rewards(
    scores: Float[Tensor, "*batch"],
    logprobs: Float[Tensor, "*batch time"],
    ref_logprobs: Float[Tensor, "*batch time"] | None,
    mask: Bool[Tensor, "*batch time"],
    *,
    kl_coef: float,
    kl_estimator: KLEstimator = "k1",
    score_at: ScoreAt = "last",
    kl_scope: KLScope = "token",
    token_scores: Float[Tensor, "*batch time"] | None = None,
) -> ShapedRewards:
    """Rewards per action: the score at one slot, plus process rewards, minus the KL penalty.

    r_t = −β·KL_t + score·[t = slot] + token_score_t,   KL_t = estimate of log π(a_t) − log π_ref(a_t)

    Raising π over π_ref on a token lowers that token's reward. A response "a b EOS PAD PAD" has L = 2: "last" puts its
    score at 2, "after_last" at 3; the mask then counts that slot as well, and the critic is trained on it.

    Args:
        scores: one number per response.
        logprobs: of the response tokens at the start of the PPO epochs, nats.
        ref_logprobs: of the same tokens under the reference; None where `kl_coef` is 0.
        mask: the action mask, True = counts, at least one action in each row.
        kl_coef: β ≥ 0; with 0 the reference is not used.
        kl_estimator: as in `kl_estimate`.
        score_at: "last": at L, the last counted index; "after_last": at L+1, or at L if the tensor ends there.
        kl_scope: "token": each token's KL is subtracted from its own reward; "sequence": the response's summed KL is
            subtracted from its score (S1's adjusted reward R − β·ΣKL).
        token_scores: one number per action, from a process reward; each is added at its own action.

    Returns:
        `.rewards`, 0 in masked slots, and `.mask`, the slots that count. No gradient.

    Raises:
        ShapeError: when shapes differ or a response has no token.
        ConfigError: when `kl_coef` is not 0 and `ref_logprobs` is None.

    Source: S1, S3, N+ (after_last); spec §5.18, §5.22, §13.
    """
    check_counted(mask, logprobs=logprobs, ref_logprobs=ref_logprobs, token_scores=token_scores)
    check_same_shape(scores=scores, mask_without_time=mask[..., 0])
    check_choice("kl_scope", kl_scope, KLScope)
    slot = _score_slot(mask, score_at)
    penalty = _kl_penalty(logprobs, ref_logprobs, mask, kl_coef=kl_coef, kl_estimator=kl_estimator)
    if kl_scope == "sequence":
        scores = scores - penalty.sum(-1)
        penalty = torch.zeros_like(penalty)
    scored = torch.zeros_like(penalty).scatter(-1, slot, scores.unsqueeze(-1).to(penalty.dtype))
    if token_scores is not None:
        scored = scored + keep_counted(token_scores, mask)
    return ShapedRewards(rewards=scored - penalty, mask=mask.scatter(-1, slot, True))


def _score_slot(mask: Tensor, score_at: ScoreAt) -> Tensor:
    """Index of each row's score, as `[..., 1]`."""
    check_choice("score_at", score_at, ScoreAt)
    # Without this check the score of an empty row would go to index −1, its last padding slot.
    empty = ~mask.any(-1)
    if empty.any():
        raise ShapeError(f"row {int(empty.flatten().int().argmax())} of the mask counts no token: an empty response")
    steps = torch.arange(mask.shape[-1], device=mask.device)
    last = (steps * mask).amax(-1, keepdim=True)
    return last if score_at == "last" else (last + 1).clamp(max=mask.shape[-1] - 1)


def _kl_penalty(
    logprobs: Tensor, ref_logprobs: Tensor | None, mask: Tensor, *, kl_coef: float, kl_estimator: KLEstimator
) -> Tensor:
    if kl_coef == 0.0:
        return torch.zeros_like(logprobs)
    if ref_logprobs is None:
        raise ConfigError(f"kl_coef={kl_coef} needs ref_logprobs, got None; pass them, or set kl_coef to 0")
    return keep_counted(kl_coef * kl_estimate(logprobs, ref_logprobs, estimator=kl_estimator), mask)
