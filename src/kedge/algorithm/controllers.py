"""The controllers of the KL and entropy coefficients."""

from __future__ import annotations

from kedge.algorithm.masking import check_finite, check_positive


def adapt_kl_coef_ziegler(kl_coef: float, kl: float, *, kl_target: float, num_episodes: int, horizon: int) -> float:
    """Change β in proportion to the relative KL error, by at most the fraction 0.2 · num_episodes / horizon.

    β ← β·(1 + e·min(n/horizon, 1)),   e = clip(KL/target − 1, −0.2, 0.2)

    The paper has n/horizon, which is far below 1 in its runs. An update of more responses than the horizon would
    otherwise make β negative, which rewards leaving the reference.

    Args:
        kl_coef: β ≥ 0.
        kl: measured KL per response, nats, e.g. the mean of `sequence_kl`.
        kl_target: target KL per response, nats, > 0.
        num_episodes: responses in the batch of this update.
        horizon: responses over which β may change by 20%.

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
