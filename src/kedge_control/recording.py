"""Renders an episode off-screen, and saves it as an animation."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kedge.training.runtime import Terminated
from kedge_base.errors import EnvError, KedgeError
from kedge_base.run_folder.output import writing
from kedge_base.texts import error_text
from kedge_control.environments import close_quietly, reason_of
from kedge_control.making import EnvironmentSpec, make_environment
from kedge_control.saving import ControlPolicy
from kedge_control.spaces import Array
from kedge_control.steps import Episode

EVERY = 2
"""Steps from one picture to the next."""

WIDTH = 320
"""Largest width of a picture, pixels."""


def record_episode(
    spec: EnvironmentSpec,
    policy: ControlPolicy,
    path: Path | None,
    *,
    seed: int = 0,
    max_steps: int = 400,
) -> Episode:
    """Play an episode and save an animated WebP of it, drawn off-screen; return its return and steps so far.

    Args:
        spec: The recipe of the environment.
        policy: It acts deterministically.
        path: The file; None saves none.
        seed: Of the episode.
        max_steps: Steps after which the recording ends.

    Raises:
        ConfigError: The environment cannot be made.
        EnvError: The environment raises an error, or cannot be rendered: it has no rendering, or OpenGL is not
            available without a screen.
        OutputError: The file cannot be written.
    """
    if sys.platform == "linux" and not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")  # MuJoCo's default needs a screen
    environment = make_environment(spec, render_mode="rgb_array")
    frames: list[Array] = []
    total = 0.0
    step = 0
    try:
        observation, _ = environment.reset(seed=seed)
        policy.begin_episode()
        for step in range(1, max_steps + 1):
            if (step - 1) % EVERY == 0:
                frames.append(_picture(environment, spec.name))
            observation, reward, terminated, truncated, _ = environment.step(policy.act(observation))
            total += float(reward)
            if terminated or truncated:
                break
    except (KedgeError, Terminated):
        raise
    except (Exception, SystemExit) as error:  # of the user's code
        raise EnvError(f"environment {spec.name!r}, while its episode was recorded: {reason_of(error)}") from error
    finally:
        close_quietly(environment, spec.name)
    if path is not None:
        speed = float(environment.metadata.get("render_fps") or 30)
        _save(frames, path, milliseconds=max(10, round(1000 * EVERY / speed)))
    return Episode(total, step)


def _picture(environment: Any, name: str) -> Array:
    try:
        picture = environment.render()
    # Drawing libraries raise their own errors: no display, no driver, a missing package.
    except Exception as error:
        raise EnvError(f"environment {name!r} cannot be drawn here: {error_text(error)}") from error
    if getattr(picture, "ndim", 0) != 3 or picture.shape[-1] != 3:
        raise EnvError(f"environment {name!r} cannot be drawn: its render() gave no RGB image")
    return picture


def _save(frames: Sequence[Array], path: Path, milliseconds: int) -> None:
    from PIL import Image

    pictures = [Image.fromarray(frame) for frame in frames]
    for picture in pictures:
        picture.thumbnail((WIDTH, picture.height))
    with writing(path):
        first, *others = pictures
        first.save(path, save_all=True, append_images=others, duration=milliseconds, loop=0, quality=60, method=4)
