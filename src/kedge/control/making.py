"""Makes environments from a name or a function, with Gymnasium's own wrappers."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import gymnasium
from gymnasium import error as gymnasium_errors
from gymnasium.spaces import Box
from gymnasium.wrappers import FlattenObservation, TimeLimit

from kedge.control.environments import Environments
from kedge.control.in_process import InProcessEnvironments
from kedge.control.spaces import spaces_of
from kedge.errors import ConfigError

__all__ = ["EnvironmentSource", "EnvironmentSpec", "Vectorization", "make_environment", "make_environments"]

Vectorization = Literal["sync", "async"]

EnvironmentSource: TypeAlias = "str | Callable[..., gymnasium.Env[Any, Any]]"
"""A registered id, `module:Id`, or a function that makes an environment."""

Wrapper: TypeAlias = "Callable[[gymnasium.Env[Any, Any]], gymnasium.Env[Any, Any]]"


@dataclass(frozen=True)
class EnvironmentSpec:
    """How an environment is made.

    Attributes:
        source: A registered id, `module:Id`, or a function.
        settings: Keyword arguments for it.
        max_episode_steps: Steps after which an episode is cut off; None for the environment's own limit.
        wrappers: Further wrappers, from the inside out.
    """

    source: EnvironmentSource
    settings: Mapping[str, Any] = field(default_factory=dict)
    max_episode_steps: int | None = None
    wrappers: Sequence[Wrapper] = ()

    @property
    def name(self) -> str:
        """For messages."""
        return self.source if isinstance(self.source, str) else getattr(self.source, "__name__", repr(self.source))


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
        num_envs: N.
        seed: Of the run: every episode begins from a seed of its own, derived from this one, the environment's number
            and the episode's.
        vectorization: In this process, or each in a process of its own.
        options: Fields of `EnvironmentSpec`.

    Raises:
        ConfigError: There is no such environment, its package is missing, its settings are wrong, or its observations
            or actions are not supported.
    """
    spec = source if isinstance(source, EnvironmentSpec) else EnvironmentSpec(source, **options)
    made = [make_environment(spec) for _ in range(num_envs)]
    spaces = spaces_of(made[0].observation_space, made[0].action_space, name=spec.name)
    return InProcessEnvironments(made, spaces, seed=seed, name=spec.name)


def make_environment(spec: EnvironmentSpec, *, render_mode: str | None = None) -> gymnasium.Env[Any, Any]:
    """Make one environment; its observations are flattened unless they are a `Box`.

    Args:
        spec: How.
        render_mode: Gymnasium's; None for no pictures.

    Raises:
        ConfigError: See `make_environments`.
    """
    settings = dict(spec.settings) if render_mode is None else {**spec.settings, "render_mode": render_mode}
    try:
        if isinstance(spec.source, str):
            limit = {} if spec.max_episode_steps is None else {"max_episode_steps": spec.max_episode_steps}
            # The checker warns about the environment's own code, at every step's cost.
            environment = gymnasium.make(spec.source, disable_env_checker=True, **limit, **settings)
        else:
            environment = spec.source(**settings)
            if spec.max_episode_steps is not None:
                environment = TimeLimit(environment, spec.max_episode_steps)
    except gymnasium_errors.DependencyNotInstalled as error:
        raise ConfigError(f"environment {spec.name!r}: {error}") from error
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"environment {spec.name!r} needs the package {error.name!r}, which is not installed"
        ) from error
    except gymnasium_errors.Error as error:
        raise ConfigError(f"environment {spec.name!r}: {error}{_nearest(spec.name)}") from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"environment {spec.name!r} cannot be made with {settings}: {error}") from error
    for wrapper in spec.wrappers:
        environment = wrapper(environment)
    return environment if isinstance(environment.observation_space, Box) else FlattenObservation(environment)


def _nearest(name: str) -> str:
    """Registered names that resemble it."""
    near = difflib.get_close_matches(name, list(gymnasium.registry), n=3)
    return f"; did you mean {' or '.join(near)}?" if near else ""
