"""Rollouts and experience: sampling responses and evaluating them."""

from kedge.rollout.background import BackgroundEngine, frozen_copy
from kedge.rollout.central import CentralEngine
from kedge.rollout.collect import (
    Estimation,
    Evaluated,
    Models,
    collect_experience,
    reference_logprobs,
    shared_out,
    still_to_evaluate,
)
from kedge.rollout.engine import Engine
from kedge.rollout.sampler import Sampler
from kedge.rollout.shared import SharedEngine

__all__ = [
    "BackgroundEngine",
    "CentralEngine",
    "Engine",
    "Estimation",
    "Evaluated",
    "Models",
    "Sampler",
    "SharedEngine",
    "collect_experience",
    "frozen_copy",
    "reference_logprobs",
    "shared_out",
    "still_to_evaluate",
]
