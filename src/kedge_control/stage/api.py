"""Control from Python: `kedge.control`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kedge.config import check_stage, config_from_settings, full_settings
from kedge.runs.run import resumed
from kedge.runs.training import Callback, check_callback
from kedge_base.errors import ConfigError
from kedge_base.run_folder.output import folder_of

if TYPE_CHECKING:  # Gymnasium is an extra
    from kedge_control.stage.result import ControlResult


def control(
    *,
    env: str | Callable[..., Any],
    network: str | Callable[..., Any] | None = None,
    out: str | os.PathLike[str] | None = None,
    resume: bool | Sequence[str] = False,
    on_update: Callback | None = None,
    **settings: Any,
) -> ControlResult:
    """Train a policy with PPO or TRPO in an environment of Gymnasium; see `kedge_control.stage.run`.

        result = kedge.control(env="HalfCheetah-v5", out="runs/cheetah")
        action = result.policy().act(observation)

    Args:
        env: An id, `module:Id`, or a function that makes an environment (itself, or as `file.py:name`).
        network: A function from the spaces to a torch module that makes features; by default `control.hidden_sizes`.
        out: The run's folder; must be empty unless its run is resumed.
        resume: Resume the run in `out`, if there is one; a list of fields or sections lets these differ.
        on_update: Called with an `Update` after each update.
        settings: Fields of the configuration, such as `total_steps` or `preset`.

    Raises:
        KedgeError: An invalid input.
    """
    for name, value in (("env", env), ("network", network)):
        if not (value is None or isinstance(value, str) or callable(value)):
            raise ConfigError(f"{name}={value!r} is not a function; expected a name, or a function that makes one")
    check_callback(on_update)
    how, out = resumed(resume, out, "control")
    named = {"control.env": env, "control.network": network, "out": None if out is None else str(folder_of(out, "out"))}
    texts = {
        name: value if isinstance(value, str) else f"python:{_name(value)}" for name, value in named.items() if value
    }
    config = config_from_settings("control", full_settings("control", settings, texts))
    check_stage(config, "control")
    from kedge_control.stage.run import run_control

    functions = {name: value for name, value in (("env", env), ("network", network)) if callable(value)}
    return run_control(config, **functions, resume=how, callback=on_update)


def _name(function: object) -> str:
    return getattr(function, "__name__", type(function).__name__)
