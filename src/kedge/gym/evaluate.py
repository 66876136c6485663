"""Plays whole episodes with a policy: their returns, and pictures of one of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kedge.errors import ConfigError, EnvError
from kedge.gym.acting import acting_function
from kedge.gym.environments import Environments, Record
from kedge.gym.episodes import Episode
from kedge.gym.making import EnvironmentSpec, make_environment
from kedge.gym.memory import blank_where
from kedge.gym.networks import ControlActorCritic
from kedge.gym.normalization import Normalization
from kedge.gym.saving import ControlPolicy
from kedge.system.output import writing

__all__ = ["Recording", "play_episodes", "record_episode", "save_animation"]


@torch.inference_mode()
def play_episodes(
    environments: Environments,
    policy: ControlActorCritic,
    normalization: Normalization,
    *,
    num_episodes: int,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    max_steps: int = 200_000,
) -> list[Episode]:
    """Play episodes from their beginning, and return them in the order of the environments.

    Every environment plays its share: were the first to finish counted, short episodes would be preferred.

    Args:
        environments: In the first state of an episode each, such as newly made ones.
        policy: Its weights do not change.
        normalization: Frozen statistics.
        num_episodes: Episodes in all.
        deterministic: The most probable actions, else drawn ones.
        generator: Of drawn actions.
        max_steps: Steps of an environment after which an unfinished episode is an error.

    Raises:
        ConfigError: An episode does not end.
    """
    num_envs = environments.num_envs
    shares = [(num_episodes + number) // num_envs for number in range(num_envs)][::-1]
    finished: list[list[Episode]] = [[] for _ in range(num_envs)]
    totals, lengths = np.zeros(num_envs), np.zeros(num_envs, np.int64)
    act, head, memory = acting_function(policy, num_envs), policy.head, policy.blank_memory(num_envs)
    for _ in range(max_steps):
        if all(len(own) >= share for own, share in zip(finished, shares, strict=True)):
            return [episode for own, share in zip(finished, shares, strict=True) for episode in own[:share]]
        record = Record.empty(1, num_envs)
        perturbed, memory = act(normalization.normalize(environments.observations), memory)
        if not deterministic:
            assert generator is not None, "drawn actions need a generator"
            perturbed = perturbed + policy.draw_noise(1, num_envs, generator)[0].numpy()
        environments.step(head.executed(head.choose(perturbed)), 0, record)
        memory = blank_where(environments.starts, memory)
        totals += np.where(record.valid[0], record.rewards[0], 0.0)
        lengths += record.valid[0]
        for number in np.flatnonzero(record.terminated[0] | record.truncated[0]).tolist():
            finished[number].append(Episode(float(totals[number]), int(lengths[number])))
            totals[number], lengths[number] = 0.0, 0
    raise ConfigError(
        f"an episode of {environments.name} did not end within {max_steps:,} steps; limit it: max_episode_steps"
    )


@dataclass(frozen=True)
class Recording:
    """Pictures of an episode.

    Attributes:
        frames: RGB images of bytes [height, width, 3].
        frames_per_second: At which they show the environment's own speed.
        episode: Its return and steps so far.
    """

    frames: Sequence[np.ndarray[Any, Any]]
    frames_per_second: float
    episode: Episode


def record_episode(
    spec: EnvironmentSpec, policy: ControlPolicy, *, seed: int = 0, max_steps: int = 1000, every: int = 1
) -> Recording:
    """Play an episode, with a picture every few steps, drawn off-screen.

    Args:
        spec: How to make the environment.
        policy: It acts deterministically.
        seed: Of the episode.
        max_steps: Steps after which the recording ends.
        every: Steps from one picture to the next.

    Raises:
        ConfigError: The environment cannot be made.
        EnvError: It cannot be drawn here: it has no pictures, or there is no OpenGL without a screen.
    """
    if sys.platform == "linux" and not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")  # MuJoCo's default needs a screen
    environment = make_environment(spec, render_mode="rgb_array")
    frames: list[np.ndarray[Any, Any]] = []
    total, step = 0.0, 0
    try:
        observation, _ = environment.reset(seed=seed)
        policy.begin_episode()
        for step in range(1, max_steps + 1):
            if (step - 1) % every == 0:
                frames.append(_picture(environment, spec.name))
            observation, reward, terminated, truncated, _ = environment.step(policy.act(observation))
            total += float(reward)
            if terminated or truncated:
                break
    finally:
        environment.close()
    speed = float(environment.metadata.get("render_fps") or 30)
    return Recording(frames, speed / every, Episode(total, step))


def _picture(environment: Any, name: str) -> np.ndarray[Any, Any]:
    try:
        picture = environment.render()
    # Drawing libraries raise errors of their own: no display, no driver, a missing package.
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise EnvError(f"environment {name!r} cannot be drawn here: {reason}") from error
    if not isinstance(picture, np.ndarray) or picture.ndim != 3 or picture.shape[-1] != 3:
        raise EnvError(f"environment {name!r} cannot be drawn: its render() gave no RGB image")
    return picture


def save_animation(recording: Recording, path: Path, *, width: int = 320) -> Path:
    """Save a recording as an animated WebP.

    Args:
        recording: At least one picture.
        path: The file; its name ends in `.webp`.
        width: Largest width, pixels.

    Raises:
        OutputError: The file cannot be written.
    """
    from PIL import Image

    pictures = [Image.fromarray(frame) for frame in recording.frames]
    height, wide = recording.frames[0].shape[:2]
    if wide > width:
        pictures = [each.resize((width, max(1, round(height * width / wide)))) for each in pictures]
    duration = max(10, round(1000 / recording.frames_per_second))
    with writing(path):
        first, *others = pictures
        first.save(path, save_all=True, append_images=others, duration=duration, loop=0, quality=60, method=4)
    return path
