"""From scores to one reward per token: the spread of a group's scores, penalties, and estimates of the KL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from typing_extensions import Unpack

from kedge.algorithm.masking import (
    Averaging,
    aggregate,
    check_choice,
    check_counted,
    check_same_shape,
    in_float64,
    keep_counted,
    rounding_of,
)
from kedge_base.errors import ConfigError, ShapeError

KLEstimator = Literal["k1", "k2", "k3"]
ScoreAt = Literal["last", "after_last"]
KLScope = Literal["token", "sequence"]
MissingEosMode = Literal["replace", "subtract"]


def total_scores(
    scores: Float[Tensor, "*batch"], token_scores: Float[Tensor, "*batch time"] | None
) -> Float[Tensor, "*batch"]:
    """Each response's score plus its tokens' scores, if any.

    Added in float64 and then rounded, so that the same numbers at other tokens give the same total: groups without
    spread are recognized by comparing totals.
    """
    if token_scores is None:
        return scores
    return (in_float64(scores) + in_float64(token_scores).sum(-1)).to(scores)


@dataclass(frozen=True)
class GroupScores:
    """The scores of an update, group by group, in the order of the groups' numbers; all on the CPU.

    Attributes:
        group: number of each group.
        place: for each response, the index of its group in the other attributes.
        count: responses.
        mean: mean score.
        std: population standard deviation of the scores.
        has_spread: two of its scores differ by more than rounding; see `rounding_of`. The scores themselves
            are compared: an estimate of the deviation can be above 0 for equal ones.
    """

    group: Int[Tensor, " groups"]
    place: Int[Tensor, " batch"]
    count: Int[Tensor, " groups"]
    mean: Float[Tensor, " groups"]
    std: Float[Tensor, " groups"]
    has_spread: Bool[Tensor, " groups"]

    def among(self, numbers: Int[Tensor, " some"]) -> Bool[Tensor, " batch"]:
        """Mask of the responses in the groups with these numbers."""
        return torch.isin(self.group, numbers)[self.place]


@torch.no_grad()
def group_scores(scores: Float[Tensor, " batch"], group: Int[Tensor, " batch"]) -> GroupScores:
    """Mean and spread of the scores of each group.

    Args:
        scores: one per response.
        group: number of each response's prompt, in any order. A group may have lost responses.

    Raises:
        ShapeError: shapes differ.

    Source: DAPO eq. 11 keeps the groups with 0 < correct < G; for scores in general, those with max > min.
    """
    check_same_shape(scores=scores, group=group)
    scores = scores.cpu()
    group = group.cpu()
    numbers, place, count = cast(
        "tuple[Tensor, Tensor, Tensor]",
        group.unique(return_inverse=True, return_counts=True),  # pyright: ignore[reportUnknownMemberType]
    )
    exact = scores.double()
    empty = torch.zeros(len(numbers), dtype=torch.float64)
    mean = empty.index_add(0, place, exact) / count
    variance = empty.index_add(0, place, (exact - mean[place]).square()) / count
    low, high = (empty.scatter_reduce(0, place, exact, how, include_self=False) for how in ("amin", "amax"))
    rounding = rounding_of(torch.maximum(high.abs(), low.abs()), scores.dtype)
    return GroupScores(numbers, place, count, mean, variance.sqrt(), high - low > rounding)


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


class ShapedRewards(NamedTuple):
    """Rewards per token, and the mask of the slots that count."""

    rewards: Float[Tensor, "*batch time"]
    mask: Bool[Tensor, "*batch time"]


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
    slot = _score_slot(mask, score_at)
    penalty = torch.zeros_like(logprobs)
    if kl_coef != 0.0:
        if ref_logprobs is None:
            raise ConfigError(f"kl_coef={kl_coef} needs ref_logprobs, got None; pass them, or set kl_coef to 0")
        penalty = keep_counted(kl_coef * kl_estimate(logprobs, ref_logprobs, estimator=kl_estimator), mask)
    if kl_scope != "token":
        check_choice("kl_scope", kl_scope, KLScope)
        scores = scores - penalty.sum(-1)
        penalty = torch.zeros_like(penalty)
    scored = torch.zeros_like(penalty).scatter(-1, slot, scores.unsqueeze(-1).to(penalty.dtype))
    if token_scores is not None:
        scored = scored + keep_counted(token_scores, mask)
    return ShapedRewards(rewards=scored - penalty, mask=mask.scatter(-1, slot, True))


def _score_slot(mask: Tensor, score_at: ScoreAt) -> Tensor:
    """Index of each row's score, as `[..., 1]`."""
    # Without this check the score of an empty row would go to index −1, its last padding slot.
    empty = ~mask.any(-1)
    if empty.any():
        raise ShapeError(f"row {int(empty.flatten().int().argmax())} of the mask counts no token: an empty response")
    steps = torch.arange(mask.shape[-1], device=mask.device)
    last = (steps * mask).amax(-1, keepdim=True)
    if score_at == "last":
        return last
    check_choice("score_at", score_at, ScoreAt)
    return (last + 1).clamp(max=mask.shape[-1] - 1)


def kl_estimate(
    logprobs: Float[Tensor, "*shape"], ref_logprobs: Float[Tensor, "*shape"], *, estimator: KLEstimator = "k1"
) -> Float[Tensor, "*shape"]:
    """Estimate KL(π‖π_ref) from tokens sampled from π: one number per token, in nats.

    log r = log π_ref − log π;   k1 = −log r,   k2 = ½(log r)²,   k3 = r − 1 − log r

    k1 is unbiased and can be negative; k2 is biased and has low variance; k3 is unbiased and never negative.

    Args:
        logprobs: of the sampled tokens under π.
        ref_logprobs: of the same tokens under π_ref, at the same temperature.
        estimator: k1, k2 or k3.

    Raises:
        ShapeError: when the shapes differ.

    Source: Schulman, "Approximating KL divergence" (2020); spec §5.20.
    """
    check_same_shape(logprobs=logprobs, ref_logprobs=ref_logprobs)
    log_ratio = ref_logprobs - logprobs
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    check_choice("estimator", estimator, KLEstimator)
    return torch.expm1(log_ratio) - log_ratio


def sequence_kl(
    logprobs: Float[Tensor, "*batch time"],
    ref_logprobs: Float[Tensor, "*batch time"],
    mask: Bool[Tensor, "*batch time"],
    *,
    estimator: KLEstimator = "k1",
) -> Float[Tensor, "*batch"]:
    """KL estimate of each response: the sum over its counted tokens, in nats. The batch mean is `objective/kl`.

    Raises:
        ShapeError: when the shapes differ or nothing counts.

    Source: spec §10.
    """
    return _counted_kl(logprobs, ref_logprobs, mask, estimator).sum(-1)


def kl_loss(
    logprobs: Float[Tensor, "*batch time"],
    ref_logprobs: Float[Tensor, "*batch time"],
    mask: Bool[Tensor, "*batch time"],
    *,
    estimator: KLEstimator = "k2",
    **averaging: Unpack[Averaging],
) -> Float[Tensor, ""]:
    """KL to the reference as a loss term; the caller multiplies it by β.

    Args:
        logprobs: of the sampled tokens under the policy, differentiable.
        ref_logprobs: of the same tokens under the frozen reference.
        mask: True = counts.
        estimator: k2, with the expected gradient of KL(π‖π_ref), or k3 (as in GRPO), with the expected gradient of
            KL(π_ref‖π). k1 is rejected: its expected gradient is 0.
        **averaging: see `aggregate`.

    Raises:
        ShapeError: when the shapes differ or nothing counts.
        ConfigError: for k1.

    Source: GRPO eq. 4; spec §5.19, §5.20.
    """
    if estimator == "k1":
        raise ConfigError("estimator k1 has an expected gradient of 0; a KL loss needs k2 or k3")
    return aggregate(_counted_kl(logprobs, ref_logprobs, mask, estimator), mask, **averaging)


def _counted_kl(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, estimator: KLEstimator) -> Tensor:
    """The KL estimate of the counted tokens, 0 elsewhere."""
    check_counted(mask, logprobs=logprobs, ref_logprobs=ref_logprobs)
    return kl_estimate(keep_counted(logprobs, mask), keep_counted(ref_logprobs, mask), estimator=estimator)
