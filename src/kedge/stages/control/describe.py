"""The metrics of a control run's experience."""

from __future__ import annotations

from kedge.algorithm.critic import explained_variance
from kedge.gym.experience import ControlExperience

__all__ = ["SHOWN", "describe"]

SHOWN = ("episode/return_mean", "episode/length_mean", "policy/approx_kl", "policy/entropy", "value/explained_variance")
"""The metrics of the progress display."""


def describe(experience: ControlExperience) -> dict[str, float]:
    """What an update is trained on: values, returns and advantages in the unit that the critic learns."""
    mask = experience.action_mask
    values, returns, advantages = (
        table[mask] for table in (experience.values, experience.returns, experience.advantages)
    )
    metrics = {
        "value/mean": values.mean(),
        "value/std": values.std(correction=0),
        "value/returns_mean": returns.mean(),
        "value/returns_std": returns.std(correction=0),
        "value/explained_variance": explained_variance(experience.values, experience.returns, mask),
        "advantage/mean": advantages.mean(),
        "advantage/std": advantages.std(correction=0),
    }
    return {name: float(value) for name, value in metrics.items()}
