"""Builds the advantage estimator, the coefficients and the objective from the configuration."""

from __future__ import annotations

from kedge.algorithm.advantages import (
    Advantage,
    GeneralizedAdvantage,
    LengthAdaptiveLambda,
    NStepAdvantage,
    RewardToGo,
    TotalReward,
)
from kedge.algorithm.critic import Bins
from kedge.algorithm.experience import Experience
from kedge.algorithm.group_advantages import (
    GreedyBaselineAdvantage,
    GroupMeanAdvantage,
    LeaveOneOutAdvantage,
    OptimalBaselineAdvantage,
    ProcessAdvantage,
)
from kedge.algorithm.policy_losses import Surrogate, named_surrogate
from kedge.config import Config, scheduled_values
from kedge.training.controllers import Coefficients, Controllers
from kedge.training.objective import Objective
from kedge.training.value_warmup import ValueWarmup

__all__ = [
    "advantage_of",
    "coefficients_of",
    "controllers_of",
    "follow_schedules",
    "learns_in_returns_std",
    "objective_of",
    "process_advantage_of",
    "reward_kl_coef",
    "surrogate_of",
    "value_bins_of",
    "value_warmup_of",
]

ZIEGLER_HORIZON = 10_000
MIN_SPREAD = 1e-4
"""Returns whose standard deviation is a smaller share of their root mean square are treated as constant: rounding is
then a visible part of their differences."""
MIN_SHARE_OF_ERROR = 0.1
"""The value loss's unit is at least this share of the critic's RMS error, so that the loss starts at ½ · 10² = 50 or
less; the standard deviation of scores that are almost all equal would multiply it by up to a million."""


def advantage_of(config: Config) -> Advantage:
    """The estimator selected by `ppo.advantage`."""
    use = config.ppo
    adaptive = LengthAdaptiveLambda(use.length_adaptive_alpha)
    gae_lambda = adaptive if use.gae_lambda == "length_adaptive" else use.gae_lambda
    estimates: dict[str, Advantage] = {
        "gae": GeneralizedAdvantage(use.gamma, gae_lambda, use.value_gae_lambda),
        "monte_carlo": GeneralizedAdvantage(use.gamma, 1.0, use.value_gae_lambda),
        "td": GeneralizedAdvantage(use.gamma, 0.0, use.value_gae_lambda),
        "n_step": NStepAdvantage(use.gamma, use.advantage_steps, use.value_gae_lambda),
        "to_go": RewardToGo(use.gamma),
        "total": TotalReward(use.gamma),
        "rloo": LeaveOneOutAdvantage(use.gamma),
        "grpo": GroupMeanAdvantage(use.gamma, scale_by_std=True),
        "dr_grpo": GroupMeanAdvantage(use.gamma),
        "reinforce++": RewardToGo(use.gamma),  # whitened over the batch, as is the next
        "reinforce++_baseline": GroupMeanAdvantage(use.gamma),
        "remax": GreedyBaselineAdvantage(use.gamma),
        "opo": OptimalBaselineAdvantage(use.gamma),
    }
    return estimates[use.advantage]


def process_advantage_of(config: Config) -> Advantage | None:
    """The estimator of the part of the rewards that a process reward gives per token; None to add it to the others."""
    name = config.ppo.advantage
    if advantage_of(config).needs != "group":
        return None
    return ProcessAdvantage(leave_one_out=name == "rloo", scale_by_std=name == "grpo")


def surrogate_of(config: Config, coefficients: Coefficients) -> Surrogate:
    """The policy loss selected by `ppo.policy_loss`."""
    use = config.ppo
    return named_surrogate(
        use.policy_loss,
        clip_range=use.clip_range,
        clip_range_high=use.clip_range_high,
        dual_clip=use.dual_clip,
        kl_coef=coefficients.surrogate_kl_coef,
    )


def coefficients_of(config: Config) -> Coefficients:
    """The first update's coefficients and their controllers."""
    ppo = config.ppo
    controllers = controllers_of(config, ppo.num_policy_updates)
    return Coefficients(controllers, ppo.kl_coef, ppo.entropy_coef, ppo.surrogate_kl_coef)


def controllers_of(config: Config, num_policy_updates: int) -> Controllers:
    """The controllers of the coefficients.

    Args:
        config: The configuration.
        num_policy_updates: Updates that train the policy; waiting time and horizon are shares of them.
    """
    ppo = config.ppo
    adaptive = ppo.policy_loss == "kl_penalty_adaptive"
    return Controllers(
        kl=ppo.kl_controller,
        kl_target=ppo.kl_target,
        kl_horizon=ppo.kl_horizon or _automatic_horizon(config, num_policy_updates),
        kl_wait_updates=ppo.kl_wait_fraction * num_policy_updates,
        entropy_target=ppo.entropy_target,
        surrogate_kl_target=ppo.surrogate_kl_target if adaptive else None,
    )


def value_warmup_of(config: Config) -> ValueWarmup:
    """The critic's warm-up, at its start."""
    value = config.ppo
    return ValueWarmup(
        most=value.value_warmup_updates, until=value.value_warmup_until, num_updates=config.ppo.num_updates
    )


def follow_schedules(coefficients: Coefficients, config: Config, update: int) -> None:
    """Give the coefficients that are scheduled the values of an update; no controller adapts these."""
    values = scheduled_values(config, update)
    coefficients.kl_coef = values.get("ppo.kl_coef", coefficients.kl_coef)
    coefficients.entropy_coef = values.get("ppo.entropy_coef", coefficients.entropy_coef)
    coefficients.surrogate_kl_coef = values.get("ppo.surrogate_kl_coef", coefficients.surrogate_kl_coef)


def reward_kl_coef(config: Config, coefficients: Coefficients) -> float:
    """β of the KL in the reward; 0 if the KL is in the loss."""
    return coefficients.kl_coef if config.ppo.kl_in == "reward" else 0.0


def objective_of(
    config: Config, experience: Experience, coefficients: Coefficients, *, train_policy: bool = True
) -> Objective:
    """The total loss of one update.

    Args:
        config: The configuration.
        experience: The update's experience; the unit of the value loss can be the spread of its returns.
        coefficients: The update's coefficients.
        train_policy: False while the critic warms up.
    """
    ppo = config.ppo
    return Objective(
        surrogate=surrogate_of(config, coefficients),
        ratio=ppo.ratio,
        value_clip_range=ppo.value_clip_range,
        value_coef=ppo.value_weight,
        value_huber_delta=ppo.value_huber_delta if ppo.value_loss == "huber" else None,
        value_bins=value_bins_of(config),
        value_unit=_returns_unit(experience) if learns_in_returns_std(config) else 1.0,
        entropy_coef=coefficients.entropy_coef,
        kl_coef=coefficients.kl_coef if ppo.kl_in == "loss" else 0.0,
        kl_estimator=ppo.resolved_kl_estimator,
        positive_nll_coef=ppo.positive_nll_coef,
        aggregation=ppo.aggregation,
        constant_length=config.rollout.max_new_tokens,
        train_policy=train_policy,
    )


def learns_in_returns_std(config: Config) -> bool:
    """True if start, loss and steps of the critic are in standard deviations of the returns (`ppo.value_unit`)."""
    value = config.ppo
    return value.value_unit == "returns_std" and value.value_loss != "hl_gauss"


def value_bins_of(config: Config) -> Bins | None:
    """The bins of the critic's histogram; None if its output is a scalar."""
    value = config.ppo
    return Bins(value.value_min, value.value_max, value.value_num_bins) if value.value_loss == "hl_gauss" else None


def _automatic_horizon(config: Config, num_policy_updates: int) -> int:
    """Ziegler's horizon, but at most 1/30 of the updates that train the policy.

    An update of n responses changes β by at most a factor 1 ± 0.2·n/horizon. With a horizon of 10,000, β would hardly
    change in a run of a few thousand responses; with 1/30 of the responses it can change by a factor of e^6 up or down.
    """
    return max(1, min(ZIEGLER_HORIZON, num_policy_updates * config.responses_per_update // 30))


def _returns_unit(experience: Experience) -> float:
    """The standard deviation of the returns, at least `MIN_SPREAD` of their RMS and `MIN_SHARE_OF_ERROR` of that of
    R − V; 1 where all of these are 0. It scales with the reward.
    """
    returns = experience.returns[experience.reward_mask]
    error = 0.0
    if experience.values is not None:
        error = float((returns - experience.values[experience.reward_mask]).square().mean().sqrt())
    size = float(returns.square().mean().sqrt())
    return max(float(returns.std(correction=0)), MIN_SHARE_OF_ERROR * error, MIN_SPREAD * size) or 1.0
