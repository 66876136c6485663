"""Rollouts and experience: sampling, and evaluating what was sampled."""

from kedge.rollout.collect import collect_experience
from kedge.rollout.engine import Engine
from kedge.rollout.sampler import Sampler

__all__ = ["Engine", "Sampler", "collect_experience"]
