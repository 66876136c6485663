"""Classifies the values of `ppo.advantage`, for the configuration and for tools that read a run's folder."""

NEED_VALUES = ("gae", "monte_carlo", "td", "n_step", "rloo_critic", "reinforce++_critic")
"""The estimators that use a critic."""

NEED_GROUPS = ("rloo", "grpo", "dr_grpo", "reinforce++_baseline", "opo", "gigpo", "rloo_critic")
"""The estimators that compare the responses to a prompt."""

NEED_BASELINE = ("remax", "spo")
"""The estimators that subtract a score of the prompt: the greedy response's, or the running mean of its responses."""

UNWHITENED = ("rloo", "grpo", "dr_grpo", "remax", "opo", "gigpo", "rloo_critic")
"""The estimators published without normalization of the advantages over the batch."""


def may_need_critic(estimator: str) -> bool:
    """True if an estimator uses a critic, or is a user's function, which may."""
    return estimator in NEED_VALUES or ":" in estimator
