"""Makes environments from a name or a function, with Gymnasium's own wrappers."""

from __future__ import annotations

import difflib
import inspect
import os
import signal
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

import gymnasium
from gymnasium import error as gymnasium_errors
from gymnasium.spaces import Box, Space
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, VectorEnv
from gymnasium.wrappers import AtariPreprocessing, FlattenObservation, FrameStackObservation, TimeLimit
from gymnasium.wrappers.vector import FlattenObservation as FlattenVectorObservation

from kedge.errors import ConfigError, KedgeError, install_line
from kedge.gym.environments import Environments, checked_observation
from kedge.gym.failures import place_of
from kedge.gym.in_process import InProcessEnvironments
from kedge.gym.pool import envpool_maker
from kedge.gym.spaces import Spaces, spaces_of
from kedge.gym.vectorized import VectorizedEnvironments
from kedge.system.importing import find_named
from kedge.system.texts import error_text, names_function

__all__ = [
    "AtariFrames",
    "EnvironmentSource",
    "EnvironmentSpec",
    "Vectorization",
    "make_environment",
    "make_environments",
]

Vectorization = Literal["sync", "async", "envpool"]

EnvironmentSource: TypeAlias = "str | Callable[..., Any]"
"""A registered id, `module:Id`, `path/to/file.py:function`, or a function; it makes an environment or a vector one."""

Wrapper: TypeAlias = "Callable[[gymnasium.Env[Any, Any]], gymnasium.Env[Any, Any]]"


@dataclass(frozen=True)
class AtariFrames:
    """How an Atari game is seen: Gymnasium's wrapper, then the latest frames side by side.

    Attributes:
        frame_skip: Frames for which an action is repeated.
        size: Height and width of a gray frame, pixels.
        stack: Latest frames in an observation.
        noop_max: An episode begins with up to so many frames without an action, drawn from its seed.
        ends_with_life: An episode ends with the first life lost.

    Source: Machado et al. 2018 (arXiv 1709.06009); the 37 details of Huang et al. 2022.
    """

    frame_skip: int = 4
    size: int = 84
    stack: int = 4
    noop_max: int = 30
    ends_with_life: bool = False


@dataclass(frozen=True)
class EnvironmentSpec:
    """How an environment is made.

    Attributes:
        source: A registered id, `module:Id`, `path/to/file.py:function`, or a function.
        settings: Keyword arguments for it.
        max_episode_steps: Steps after which an episode is cut off; None for the environment's own limit.
        wrappers: Further wrappers, from the inside out.
        atari: For names that begin with `ALE/`; None for the emulator's own frames.
    """

    source: EnvironmentSource
    settings: Mapping[str, Any] = field(default_factory=dict)
    max_episode_steps: int | None = None
    wrappers: Sequence[Wrapper] = ()
    atari: AtariFrames | None = AtariFrames()

    @property
    def name(self) -> str:
        """For messages."""
        return self.source if isinstance(self.source, str) else getattr(self.source, "__name__", repr(self.source))

    @cached_property
    def function(self) -> Callable[..., Any] | None:
        """The function that makes it; its file runs once. None if the source is an id."""
        if not isinstance(self.source, str):
            return self.source
        return find_named(self.source, word="environment", error=ConfigError) if names_function(self.source) else None


def make_environments(
    source: EnvironmentSource | EnvironmentSpec,
    num_envs: int = 1,
    *,
    seed: int = 0,
    vectorization: Vectorization = "sync",
    **options: Any,
) -> Environments:
    """Make N environments of one kind, each in the first state of an episode.

    Args:
        source: What to make.
        num_envs: N. A function that makes a vector environment is given it if it has such a parameter.
        seed: Of the run: every episode begins from a seed of its own, derived from this one, the environment's number
            and the episode's.
        vectorization: In this process, each in a process of its own, or in the threads of EnvPool, which has its own
            implementations and names; without effect on a function that makes a vector environment.
        options: Fields of `EnvironmentSpec`.

    Raises:
        ConfigError: There is no such environment, its package is missing, its settings are wrong, or its observations
            or actions are not supported.
    """
    spec = source if isinstance(source, EnvironmentSpec) else EnvironmentSpec(source, **options)
    if vectorization == "envpool":
        make = envpool_maker(spec.source, num_envs, spec.settings, spec.max_episode_steps)
        return _vectorized(make(seed), spec, seed, lambda begin: _flattened(make(begin), spec.name))
    first = _made(spec, num_envs=num_envs)
    if isinstance(first, VectorEnv):
        if first.num_envs != num_envs:
            raise ConfigError(
                f"{spec.name!r} makes {first.num_envs} environments; expected {num_envs}, the number asked for"
            )
        return _vectorized(first, spec, seed)
    if vectorization == "async":
        first.close()
        parent = os.getpid()
        alone = replace(spec)  # a worker runs the file of a function for itself
        spaces = spaces_of(first.observation_space, first.action_space, name=spec.name)
        makers = [lambda: _in_worker(alone, spaces, parent)] * num_envs
        return _vectorized(AsyncVectorEnv(makers, autoreset_mode=AutoresetMode.DISABLED), spec, seed)
    others = [make_environment(spec) for _ in range(num_envs - 1)]
    spaces = spaces_of(first.observation_space, first.action_space, name=spec.name)
    return InProcessEnvironments([first, *others], spaces, seed=seed, name=spec.name)


def _vectorized(
    vector: VectorEnv[Any, Any, Any],
    spec: EnvironmentSpec,
    seed: int,
    make: Callable[[int], VectorEnv[Any, Any, Any]] | None = None,
) -> VectorizedEnvironments:
    vector = _flattened(vector, spec.name)
    spaces = spaces_of(vector.single_observation_space, vector.single_action_space, name=spec.name)
    return VectorizedEnvironments(vector, spaces, seed=seed, name=spec.name, make=make)


def _flattened(vector: VectorEnv[Any, Any, Any], name: str) -> VectorEnv[Any, Any, Any]:
    if isinstance(vector.single_observation_space, Box):
        return vector
    if vector.metadata.get("autoreset_mode") == AutoresetMode.SAME_STEP:
        raise ConfigError(
            f"environment {name!r}: Gymnasium flattens the observations of a vector environment only with "
            "autoreset_mode=DISABLED or NEXT_STEP, and this one has SAME_STEP; change it, or let it give a Box"
        )
    return FlattenVectorObservation(vector)


class _Checked(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An environment in a process of its own: numpy would make what it gives fit the shared memory."""

    def __init__(self, environment: gymnasium.Env[Any, Any], spaces: Spaces) -> None:
        super().__init__(environment)
        self._spaces = spaces

    def reset(self, **options: Any) -> Any:
        observation, info = self.env.reset(**options)
        return checked_observation(observation, self._spaces), info

    def step(self, action: Any) -> Any:
        observation, *others = self.env.step(action)
        return checked_observation(observation, self._spaces), *others


def _in_worker(spec: EnvironmentSpec, spaces: Spaces, parent: int) -> gymnasium.Env[Any, Any]:
    """An environment in a process of its own. Ctrl-C is the trainer's to handle: it still needs the workers."""
    if os.getpid() != parent:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not the trainer's handler, which a fork inherits
    return _Checked(make_environment(spec), spaces)


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
    except gymnasium_errors.DependencyNotInstalled as error:
        raise ConfigError(f"environment {spec.name!r}: {error}") from error
    except ModuleNotFoundError as error:
        if error.name is None:  # Gymnasium's own, of `module:Id`
            raise ConfigError(f"environment {spec.name!r}: {error_text(error)}") from error
        raise ConfigError(
            f"environment {spec.name!r} needs the package {error.name!r}, which is not installed; "
            f"{install_line('control')} has those of MuJoCo"
        ) from error
    except gymnasium_errors.Error as error:
        raise ConfigError(f"environment {spec.name!r}: {error}{_nearest(spec.name)}") from error
    except KedgeError:
        raise
    except (Exception, SystemExit) as error:  # of the user's code
        with_what = f" with {settings}" if settings else ""
        reason = f"{type(error).__name__}: {error_text(error)} ({place_of(error)})"
        raise ConfigError(f"environment {spec.name!r} cannot be made{with_what}: {reason}") from error
    if isinstance(made, VectorEnv):
        return made
    if not isinstance(made, gymnasium.Env):
        raise ConfigError(f"environment {spec.name!r} is {type(made).__name__}; expected a gymnasium.Env")
    for wrapper in spec.wrappers:
        made = wrapper(made)
    for what in ("observation_space", "action_space"):
        if not isinstance(getattr(made, what, None), Space):
            raise ConfigError(f"environment {spec.name!r} has no {what}: it must be a gymnasium.spaces.Space")
    return made if isinstance(made.observation_space, Box) else FlattenObservation(made)


def _from_source(spec: EnvironmentSpec, settings: dict[str, Any], num_envs: int) -> Any:
    """What the name or the function makes, with the limit of steps."""
    source, limit, function = spec.source, spec.max_episode_steps, spec.function
    if function is not None:
        if not isinstance(function, type) and "num_envs" in inspect.signature(function).parameters:
            settings = {"num_envs": num_envs, **settings}
        made = function(**settings)
        if limit is not None and isinstance(made, VectorEnv):
            raise ConfigError(
                f"environment {spec.name!r} is a vector environment, whose episodes max_episode_steps cannot cut; "
                "limit them where it is made"
            )
        return made if limit is None else TimeLimit(made, limit)
    assert isinstance(source, str)
    # The checker looks at every step, to warn about the environment's own code.
    options = {"disable_env_checker": True, **settings}
    if source.rpartition(":")[-1].startswith("ALE/"):
        _register_atari(source)
        if spec.atari is not None:
            game = _with_frames(_atari_game(source, options), spec.atari)
            return game if limit is None else TimeLimit(game, limit)  # in steps, of several frames each
    if limit is not None:
        options["max_episode_steps"] = limit
    _watch_mujoco(source)
    return gymnasium.make(source, **options)


def _atari_game(name: str, options: Mapping[str, Any]) -> gymnasium.Env[Any, Any]:
    """A game frame by frame, as Gymnasium's wrapper of its frames needs it."""
    for option, instead in (("frameskip", "control.frame_skip"), ("obs_type", None)):
        if option in options:
            use = f"use {instead}" if instead else "leave it out: kedge sees games by their frames"
            raise ConfigError(f"environment {name!r}: env_options.{option} is not supported; {use}")
    return gymnasium.make(name, **options, frameskip=1)


def _watch_mujoco(name: str) -> None:
    """Let MuJoCo warn through Python, in place of a file in the working directory."""
    spec = gymnasium.registry.get(name)
    if spec is None or "mujoco" not in str(spec.entry_point):
        return
    try:
        import mujoco
    except ModuleNotFoundError as error:
        raise ConfigError(f"environment {name!r} needs MuJoCo: {install_line('control')}") from error

    def warn(text: str) -> None:
        # Gymnasium's own models use what MuJoCo 4 calls deprecated; the user can do nothing about it.
        if "deprecated" not in text:
            warnings.warn(f"MuJoCo: {text}", RuntimeWarning, stacklevel=2)

    mujoco.set_mju_user_warning(warn)  # pyright: ignore[reportAttributeAccessIssue]


def _with_frames(game: gymnasium.Env[Any, Any], frames: AtariFrames) -> gymnasium.Env[Any, Any]:
    seen = AtariPreprocessing(
        game,
        noop_max=frames.noop_max,
        frame_skip=frames.frame_skip,
        screen_size=frames.size,
        terminal_on_life_loss=frames.ends_with_life,
    )
    return FrameStackObservation(seen, frames.stack) if frames.stack > 1 else seen


def _register_atari(name: str) -> None:
    try:
        import ale_py  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"environment {name!r} needs the emulator: {install_line('atari')} (it is under the GPL)"
        ) from error
    gymnasium.register_envs(ale_py)


def _nearest(name: str) -> str:
    """Registered names that resemble it."""
    near = difflib.get_close_matches(name, list(gymnasium.registry), n=3)
    return f"; did you mean {' or '.join(near)}?" if near else ""
