"""EnvPool: environments in C++, stepped by threads, where the library is installed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gymnasium.vector import VectorEnv

from kedge.errors import ConfigError, install_line

__all__ = ["envpool_maker"]


def envpool_maker(
    source: object, num_envs: int, settings: Mapping[str, Any], max_episode_steps: int | None
) -> Callable[[int], VectorEnv[Any, Any, Any]]:
    """A function that makes EnvPool's vector environment from a seed: its `reset` takes none.

    Args:
        source: EnvPool's name of the environment.
        num_envs: Environments.
        settings: Keyword arguments for it.
        max_episode_steps: Steps after which an episode is cut off; None for the environment's own limit.

    Raises:
        ConfigError: The library is missing, or `source` is not a name; when called, an unknown name or setting.
    """
    try:
        import envpool  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise ConfigError(f"vectorization=envpool needs the library: {install_line('envpool')}") from error
    if not isinstance(source, str):
        raise ConfigError("EnvPool makes environments by name, not by a function; use vectorization=sync or async")
    limit = {} if max_episode_steps is None else {"max_episode_steps": max_episode_steps}

    def make(seed: int) -> VectorEnv[Any, Any, Any]:
        try:
            return envpool.make(source, env_type="gymnasium", num_envs=num_envs, seed=seed, **limit, **settings)
        except (AssertionError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"EnvPool cannot make {source!r} with {dict(settings)}: {reason}") from error

    return make
