"""Whether a control run's update is compiled."""

from __future__ import annotations

import os
import shutil
import sys

from kedge.config import Config
from kedge.gym.experience import ControlExperience
from kedge.gym.learner import ControlLearner
from kedge.logs.progress import say
from kedge.system.ranks import tokens_of
from kedge.training.compiled import CompiledUpdate, can_compile_optimizer
from kedge.training.optimizer_kinds import Optimizer

__all__ = ["compiled_update"]

LEAST_STEPS = 30_000
"""Optimizer steps from which on compiling pays: it takes 20 s of CPU time and saves a millisecond of every step."""


def compiled_update(
    config: Config, learner: ControlLearner, optimizer: Optimizer
) -> CompiledUpdate[ControlExperience] | None:
    """The run's compiled update; None if its steps are taken one operation at a time.

    Args:
        config: The configuration.
        learner: Of policy and critic. A compiled step is one pass over its minibatch.
        optimizer: Of their parameters.
    """
    wanted = config.control.compile
    if wanted == "auto":
        wanted = _pays(config, learner) and has_compiler()
    if not wanted or not can_compile_optimizer(optimizer):
        return None
    return CompiledUpdate(learner, learner.policy, optimizer, say)


def _pays(config: Config, learner: ControlLearner) -> bool:
    """Whether a run has many small steps whose graph is known to work."""
    loop, policy, most = config.control, learner.policy, tokens_of(learner.micro_batch)
    steps = config.control.num_updates * loop.num_epochs * loop.num_minibatches
    is_plain = not (policy.spaces.is_image or policy.has_custom_network or config.control.memory_size)
    is_ppo = loop.algorithm == "ppo" and loop.early_stop_kl is None
    is_one_pass = most is None or config.control.steps_per_update <= most * loop.num_minibatches
    return is_plain and is_ppo and is_one_pass and policy.device.type == "cpu" and steps >= LEAST_STEPS


def has_compiler() -> bool:
    """Whether the C++ compiler that torch would call is there."""
    usual = {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
    return shutil.which(os.environ.get("CXX", usual)) is not None
