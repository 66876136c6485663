"""KL estimates from samples, the KL loss term, and the controllers of the KL and entropy coefficients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from typing_extensions import Unpack

from kedge.algorithm.masking import (
    Averaging,
    aggregate,
    check_choice,
    check_counted,
    check_finite,
    check_positive,
    check_same_shape,
    keep_counted,
)
from kedge.errors import ConfigError

__all__ = [
    "KLEstimator",
    "Mismatch",
    "adapt_entropy_coef",
    "adapt_kl_coef_schulman",
    "adapt_kl_coef_ziegler",
    "kl_estimate",
    "kl_loss",
    "sampler_mismatch",
    "sequence_kl",
]


KLEstimator = Literal["k1", "k2", "k3"]


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
    check_choice("estimator", estimator, KLEstimator)
    log_ratio = ref_logprobs - logprobs
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
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
    check_counted(mask, logprobs=logprobs, ref_logprobs=ref_logprobs)
    blank = keep_counted(logprobs, mask), keep_counted(ref_logprobs, mask)
    return kl_estimate(*blank, estimator=estimator).sum(-1)


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
    check_counted(mask, logprobs=logprobs, ref_logprobs=ref_logprobs)
    blank = keep_counted(logprobs, mask), keep_counted(ref_logprobs, mask)
    estimate = kl_estimate(*blank, estimator=estimator)
    return aggregate(estimate, mask, **averaging)


def adapt_kl_coef_ziegler(kl_coef: float, kl: float, *, kl_target: float, num_episodes: int, horizon: int) -> float:
    """Change β in proportion to the relative KL error, by at most the fraction 0.2 · num_episodes / horizon.

    β ← β·(1 + e·min(n/horizon, 1)),   e = clip(KL/target − 1, −0.2, 0.2)

    The paper has n/horizon, far below 1 there. An update of more responses than the horizon would otherwise make β
    negative, which rewards leaving the reference.

    Args:
        kl_coef: β ≥ 0.
        kl: measured KL per response, nats, e.g. the mean of `sequence_kl`.
        kl_target: target KL per response, nats, > 0.
        num_episodes: responses in the batch of this update.
        horizon: responses over which β may change by 20 %.

    Raises:
        ConfigError: for a non-finite KL, or a target or horizon that is not above 0.

    Source: Ziegler §2.2; spec §5.21.
    """
    check_finite(kl=kl)
    check_positive(kl_target=kl_target, horizon=horizon)
    error = min(max(kl / kl_target - 1.0, -0.2), 0.2)
    return kl_coef * (1.0 + error * min(num_episodes / horizon, 1.0))


def adapt_kl_coef_schulman(kl_coef: float, kl: float, *, kl_target: float) -> float:
    """Halve β if the policy moved too little, double it if it moved too far.

    β ← β/2 if KL < target/1.5;   β ← 2β if KL > 1.5·target;   otherwise unchanged

    Args:
        kl_coef: β ≥ 0.
        kl: measured KL, nats, per token or per response like the target.
        kl_target: target KL, nats, > 0.

    Raises:
        ConfigError: for a non-finite KL or a target that is not above 0.

    Source: PPO §4; spec §5.21.
    """
    check_finite(kl=kl)
    check_positive(kl_target=kl_target)
    if kl < kl_target / 1.5:
        return kl_coef / 2.0
    return kl_coef * 2.0 if kl > kl_target * 1.5 else kl_coef


def adapt_entropy_coef(
    entropy_coef: float, entropy: float, *, entropy_target: float, step_size: float = 1e-3, max_coef: float = 0.1
) -> float:
    """Raise the entropy coefficient while the policy's entropy is below its target, lower it while above.

    c ← clip(c + step_size·(target − H), 0, max_coef)

    c is the Lagrange multiplier of the constraint H ≥ target, updated by dual ascent; it is 0 while the constraint
    holds with slack.

    Args:
        entropy_coef: c ≥ 0.
        entropy: measured mean entropy, nats per token.
        entropy_target: target entropy, nats per token.
        step_size: change of c per update and nat, > 0.
        max_coef: upper bound of c, > 0.

    Raises:
        ConfigError: for a non-finite entropy, or a step size or bound that is not above 0.

    Source: S4 "entropy adaptation"; the constrained form of SAC (arXiv 1812.05905 §5); spec §6.29.
    """
    check_finite(entropy=entropy, entropy_target=entropy_target)
    check_positive(step_size=step_size, max_coef=max_coef)
    return min(max(entropy_coef + step_size * (entropy_target - entropy), 0.0), max_coef)


@dataclass(frozen=True)
class Mismatch:
    """Distances between the sampler's and the trainer's distributions, over the sampled tokens.

    Attributes:
        k3: Estimate of KL(sampler ‖ trainer), nats per token, ≥ 0.
        largest_ratio: Largest ratio of the two probabilities of a token, in either direction, ≥ 1.
        effective_share: Effective sample size of the tokens under importance weights, as a share of their number.
    """

    k3: float
    largest_ratio: float
    effective_share: float


def sampler_mismatch(
    logprobs: Float[Tensor, "*batch time"],
    sampler_logprobs: Float[Tensor, "*batch time"],
    mask: Bool[Tensor, "*batch time"],
) -> Mismatch:
    """Compare the log probabilities of sampled tokens.

    w_t = π_trainer(a_t) / π_sampler(a_t);   k3 = mean(w − 1 − log w);   share = (Σ w)² / (n · Σ w²)

    Args:
        logprobs: the trainer's log probabilities, under the weights used for sampling.
        sampler_logprobs: the sampler's.
        mask: True = counts.

    Raises:
        ShapeError: when the shapes differ or nothing counts.

    Source: k3: Schulman, "Approximating KL divergence" (2020); effective sample size: Kong (1992).
    """
    check_counted(mask, logprobs=logprobs, sampler_logprobs=sampler_logprobs)
    # Differences near 0 cancel in float32: exp(d) − 1 − d is then below its rounding.
    log_ratio = keep_counted((logprobs - sampler_logprobs).detach(), mask)[mask].double()
    k3 = (torch.expm1(log_ratio) - log_ratio).mean()
    # Shifted by the largest, which cancels in the share, so that no weight overflows.
    weights = (log_ratio - log_ratio.max()).exp()
    share = weights.sum().square() / (weights.square().sum() * len(weights))
    return Mismatch(float(k3), float(log_ratio.abs().max().exp()), float(share))
