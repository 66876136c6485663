"""The animation of an episode in a control run's folder."""

from __future__ import annotations

from pathlib import Path

from kedge.config import Config
from kedge.errors import ConfigError, EnvError
from kedge.gym.evaluate import Recording, record_episode, save_animation
from kedge.gym.saving import ControlPolicy
from kedge.stages.control.parts import Parts
from kedge.system.output import VIDEO_FILE
from kedge.training.runtime import stream_seed

__all__ = ["check_video", "record_video"]

MOST_STEPS = 400
"""Of the recorded episode."""


def check_video(config: Config, parts: Parts) -> None:
    """Draw one picture, so that a missing renderer is found before the training.

    Raises:
        ConfigError: The environment cannot be drawn here.
    """
    try:
        _record(config, parts, most_steps=1)
    except EnvError as error:
        raise ConfigError(f"control.video=true: {error}; leave it out, or install a renderer") from error


def record_video(config: Config, parts: Parts, folder: Path) -> None:
    """Record an episode of the policy.

    Raises:
        EnvError: The environment cannot be drawn any longer.
        OutputError: The file cannot be written.
    """
    save_animation(_record(config, parts, most_steps=MOST_STEPS), folder / VIDEO_FILE)


def _record(config: Config, parts: Parts, *, most_steps: int) -> Recording:
    seed = stream_seed(config.runtime.seed, "video") % 2**31
    policy = ControlPolicy(parts.policy, parts.normalization)
    return record_episode(parts.spec, policy, seed=seed, max_steps=most_steps, every=2)
