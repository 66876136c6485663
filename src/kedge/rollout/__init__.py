"""Rollouts and experience: sampling responses and evaluating them."""

from kedge.rollout.background import BackgroundEngine, frozen_copy
from kedge.rollout.central import CentralEngine
from kedge.rollout.engine import Engine
from kedge.rollout.experience import (
    Estimation,
    Models,
    ModelsRead,
    RolloutOutputs,
    evaluate_rollout,
    experience_from,
    reference_logprobs,
    shared_out,
)
from kedge.rollout.sampler import Sampler
from kedge.rollout.shared import SharedEngine

__all__ = [
    "BackgroundEngine",
    "CentralEngine",
    "Engine",
    "Estimation",
    "Models",
    "ModelsRead",
    "RolloutOutputs",
    "Sampler",
    "SharedEngine",
    "evaluate_rollout",
    "experience_from",
    "frozen_copy",
    "reference_logprobs",
    "shared_out",
]
