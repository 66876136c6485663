"""Rollouts and experience: sampling responses and evaluating them."""

from kedge.rollout.collect import collect_experience
from kedge.rollout.engine import Engine
from kedge.rollout.sampler import Sampler

__all__ = ["Engine", "Sampler", "collect_experience"]
