"""Whether a control run's update is compiled."""

from __future__ import annotations

import os
import shutil
import sys

from kedge.config import Config
from kedge.gym.experience import ControlExperience
from kedge.gym.learner import ControlLearner
from kedge.gym.networks import ControlActorCritic
from kedge.logs.progress import say
from kedge.training.compiled import CompiledUpdate, can_compile_optimizer
from kedge.training.optimizer_kinds import Optimizer

__all__ = ["compiled_update"]

LEAST_STEPS = 30_000
"""Optimizer steps from which on compiling pays: it takes 20 s of CPU time and saves a millisecond of every step."""


def compiled_update(
    config: Config, policy: ControlActorCritic, optimizer: Optimizer
) -> CompiledUpdate[ControlExperience] | None:
    """The run's compiled update; None if its steps are taken one operation at a time.

    Args:
        config: The configuration.
        policy: Policy and critic.
        optimizer: Of their parameters.
    """
    wanted = config.control.loop.compile
    if wanted == "auto":
        wanted = _pays(config, policy) and has_compiler()
    if not wanted or not can_compile_optimizer(optimizer):
        return None
    return CompiledUpdate(ControlLearner(policy), policy, optimizer, say)


def _pays(config: Config, policy: ControlActorCritic) -> bool:
    """Whether a run has many small steps whose graph is known to work."""
    loop = config.control.loop
    steps = config.control.num_updates * loop.num_epochs * loop.num_minibatches
    is_plain = not (policy.spaces.is_image or policy.has_custom_network or config.control.networks.memory_size)
    is_ppo = loop.algorithm == "ppo" and loop.early_stop_kl is None
    return is_plain and is_ppo and policy.device.type == "cpu" and steps >= LEAST_STEPS


def has_compiler() -> bool:
    """Whether the C++ compiler that torch would call is there."""
    usual = {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
    return shutil.which(os.environ.get("CXX", usual)) is not None
