"""Imports a reward function by name: `path/to/file.py:function` or `package.module:function`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kedge.errors import RewardError
from kedge.rewards.function import FunctionReward
from kedge.system.importing import find_named
from kedge.system.texts import names_function

__all__ = ["find_function", "load_function", "names_function"]


def load_function(spec: str) -> Callable[..., Any]:
    """The reward function of a given name; see `find_named`.

    Raises:
        RewardError: No such function, or it does not take `completions`.
    """
    function = find_function(spec)
    FunctionReward(function)  # checks its signature now, not after the first rollout
    return function


def find_function(spec: str) -> Callable[..., Any]:
    """The function of a given name, with any signature; see `find_named`.

    Raises:
        RewardError: No such file, module or function; the import raised; it is not callable.
    """
    return find_named(spec, word="reward", error=RewardError)
