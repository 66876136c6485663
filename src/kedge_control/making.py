"""Makes environments from a name or a function, with Gymnasium's own wrappers."""

from __future__ import annotations

import inspect
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

import gymnasium
from gymnasium import error as gymnasium_errors
from gymnasium.spaces import Box, Space
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, VectorEnv
from gymnasium.wrappers import AtariPreprocessing, FlattenObservation, FrameStackObservation
from gymnasium.wrappers.vector import FlattenObservation as FlattenVectorObservation

from kedge.training.runtime import Terminated
from kedge_base.errors import ConfigError, KedgeError, install_line
from kedge_base.importing import find_named
from kedge_base.texts import error_text, names_function
from kedge_control.environments import Checked, Environments, InProcess, close_quietly, reason_of
from kedge_control.spaces import Spaces, spaces_of

Vectorization = Literal["sync", "async"]

EnvironmentSource: TypeAlias = "str | Callable[..., Any]"
"""A registered id, `module:Id`, `path/to/file.py:function`, or a function; the function makes an environment or a
vector environment.
"""


@dataclass(frozen=True)
class EnvironmentSpec:
    """Recipe for making an environment.

    Attributes:
        source: A registered id, `module:Id`, `path/to/file.py:function`, or a function.
        settings: Keyword arguments for it.
    """

    source: EnvironmentSource
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """For messages."""
        return self.source if isinstance(self.source, str) else getattr(self.source, "__name__", repr(self.source))

    @cached_property
    def function(self) -> Callable[..., Any] | None:
        """The function that makes the environment; its file runs once. None if the source is an id."""
        if not isinstance(self.source, str):
            return self.source
        return find_named(self.source, word="environment", error=ConfigError) if names_function(self.source) else None


def make_environments(
    source: EnvironmentSource | EnvironmentSpec,
    num_envs: int = 1,
    *,
    seed: int = 0,
    vectorization: Vectorization = "sync",
    beside: Environments | None = None,
) -> Environments:
    """Make N environments of one kind, each in the first state of an episode.

    Args:
        source: The environment to make; a spec also has keyword arguments for it.
        num_envs: N, which is also passed to a function that makes a vector environment, if it has such a parameter.
        seed: The run's seed. Every episode starts from its own seed, derived from this one and the numbers of
            environment and episode.
        vectorization: In this process, or each in a separate process; without effect on a function that makes a
            vector environment.
        beside: Environments in use, whose episodes must not be disturbed.

    Raises:
        ConfigError: The environment is unknown, its package is missing, its settings are wrong, its observations
            or actions are not supported, or a function returns the same environment again.
    """
    in_use = [] if beside is None else beside.unwrapped
    spec = source if isinstance(source, EnvironmentSpec) else EnvironmentSpec(source)
    first = _made(spec, num_envs=num_envs)
    if isinstance(first, VectorEnv):
        if first.num_envs != num_envs:
            raise ConfigError(
                f"{spec.name!r} makes {first.num_envs} environments; expected {num_envs}, the number asked for"
            )
        _check_separate([*in_use, first.unwrapped], spec.name)
        return Environments(_flattened(first, spec.name), spec.name, seed=seed)
    spaces = spaces_of(first.observation_space, first.action_space, name=spec.name)
    if vectorization == "async":
        close_quietly(first, spec.name)
        parent = os.getpid()
        alone = replace(spec)  # a worker runs the file of a function for itself
        makers = [lambda: _in_worker(alone, spaces, parent)] * num_envs
        return Environments(AsyncVectorEnv(makers, autoreset_mode=AutoresetMode.DISABLED), spec.name, seed=seed)
    made = [first, *(make_environment(spec) for _ in range(num_envs - 1))]
    _check_separate([*in_use, *(each.unwrapped for each in made)], spec.name)
    return Environments(InProcess([Checked(each, spaces) for each in made]), spec.name, seed=seed)


def _check_separate(environments: Sequence[object], name: str) -> None:
    """Reject an environment that is used twice: each use would reset and step the other's episodes."""
    if len({id(each) for each in environments}) < len(environments):
        raise ConfigError(f"environment {name!r}: its function returns the same one again; make a new one in it")


def _flattened(vector: VectorEnv[Any, Any, Any], name: str) -> VectorEnv[Any, Any, Any]:
    if isinstance(vector.single_observation_space, Box):
        return vector
    if vector.metadata.get("autoreset_mode") == AutoresetMode.SAME_STEP:
        raise ConfigError(
            f"environment {name!r}: Gymnasium flattens the observations of a vector environment only with "
            "autoreset_mode=DISABLED or NEXT_STEP, and this one has SAME_STEP; change it, or let it give a Box"
        )
    return FlattenVectorObservation(vector)


def _in_worker(spec: EnvironmentSpec, spaces: Spaces, parent: int) -> gymnasium.Env[Any, Any]:
    """Make an environment in a separate process that ends with the trainer.

    The trainer handles Ctrl-C, since it still needs the workers. A trainer that is killed cannot end them, and one that
    hangs in a step, or waits at a pipe with its other end in a sibling, would never notice.
    """
    if os.getpid() != parent:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not the trainer's handler, which a fork inherits
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    return Checked(make_environment(spec), spaces)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def make_environment(spec: EnvironmentSpec, *, render_mode: str | None = None) -> gymnasium.Env[Any, Any]:
    """Make one environment; its observations are flattened unless they are a `Box`.

    Args:
        spec: How.
        render_mode: Gymnasium's; None for no pictures.

    Raises:
        ConfigError: See `make_environments`; or the source makes a vector environment.
    """
    made = _made(spec, render_mode=render_mode)
    if isinstance(made, VectorEnv):
        raise ConfigError(f"environment {spec.name!r} is a vector environment; expected a single one")
    return made


def _made(
    spec: EnvironmentSpec, *, num_envs: int = 1, render_mode: str | None = None
) -> gymnasium.Env[Any, Any] | VectorEnv[Any, Any, Any]:
    settings = dict(spec.settings) if render_mode is None else {**spec.settings, "render_mode": render_mode}
    try:
        made = _from_source(spec, settings, num_envs)
    except (KedgeError, Terminated):
        raise
    except (gymnasium_errors.Error, ModuleNotFoundError) as error:
        raise ConfigError(f"environment {spec.name!r}: {_unavailable(error)}") from error
    except (Exception, SystemExit) as error:  # of the user's code
        with_what = f" with {settings}" if settings else ""
        raise ConfigError(f"environment {spec.name!r} cannot be made{with_what}: {reason_of(error)}") from error
    if isinstance(made, VectorEnv):
        return made
    if not isinstance(made, gymnasium.Env):
        raise ConfigError(f"environment {spec.name!r} is {type(made).__name__}; expected a gymnasium.Env")
    for what in ("observation_space", "action_space"):
        if not isinstance(getattr(made, what, None), Space):
            raise ConfigError(f"environment {spec.name!r} has no {what}: it must be a gymnasium.spaces.Space")
    return made if isinstance(made.observation_space, Box) else FlattenObservation(made)


def _unavailable(error: gymnasium_errors.Error | ModuleNotFoundError) -> str:
    """Return the reason why Gymnasium could not make an environment, and a remedy."""
    if isinstance(error, ModuleNotFoundError) and error.name is not None:  # Gymnasium's own error has no name
        return f"it needs the package {error.name!r}; {install_line('control')} has those of MuJoCo"
    return error_text(error)


def _from_source(spec: EnvironmentSpec, settings: dict[str, Any], num_envs: int) -> Any:
    """Make the environment from its name or function."""
    source = spec.source
    function = spec.function
    if function is not None:
        if not isinstance(function, type) and "num_envs" in inspect.signature(function).parameters:
            settings = {"num_envs": num_envs, **settings}
        return function(**settings)
    assert isinstance(source, str)
    # The checker examines every step, to warn about the environment's own code.
    options = {"disable_env_checker": True, **settings}
    if source.rpartition(":")[-1].startswith("ALE/"):
        return _atari_game(source, options)
    _watch_mujoco(source)
    return gymnasium.make(source, **options)


def _atari_game(name: str, options: Mapping[str, Any]) -> gymnasium.Env[Any, Any]:
    """Make a game that is observed through its frames: four per action, gray, 84 × 84, with the latest four stacked.

    Source: Mnih et al. 2015; Machado et al. 2018 (arXiv 1709.06009).
    """
    try:
        import ale_py  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"environment {name!r} needs the emulator: {install_line('atari')} (it is under the GPL)"
        ) from error
    gymnasium.register_envs(ale_py)
    for option in {"frameskip", "obs_type"} & options.keys():
        raise ConfigError(
            f"environment {name!r}: env_options.{option} is not supported: kedge sees games by their frames, four per "
            "action; a function can make it differently (file.py:name)"
        )
    return FrameStackObservation(AtariPreprocessing(gymnasium.make(name, **options, frameskip=1)), 4)


def _watch_mujoco(name: str) -> None:
    """Make MuJoCo warn through Python instead of a file in the working directory."""
    spec = gymnasium.registry.get(name)
    if spec is None or "mujoco" not in str(spec.entry_point):
        return
    try:
        import mujoco
    except ModuleNotFoundError as error:
        raise ConfigError(f"environment {name!r} needs MuJoCo: {install_line('control')}") from error

    def warn(text: str) -> None:
        # Gymnasium's own models use features that MuJoCo 4 deprecates; the user cannot change that.
        if "deprecated" not in text:
            warnings.warn(f"MuJoCo: {text}", RuntimeWarning, stacklevel=2)

    mujoco.set_mju_user_warning(warn)  # pyright: ignore[reportAttributeAccessIssue]
