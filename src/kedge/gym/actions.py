"""From the outputs of a policy to the actions that an environment takes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from kedge.errors import ConfigError
from kedge.gym.distributions import (
    Bernoulli,
    Categorical,
    DiagonalGaussian,
    Distribution,
    MultiCategorical,
    SquashedGaussian,
)
from kedge.gym.spaces import Spaces

__all__ = ["ActionBounds", "ActionHead"]

ActionBounds = Literal["clip", "squash", "none"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class ActionHead:
    """The family of an environment's actions.

    Args:
        spaces: Of the environment.
        bounds: How numbers are kept within the environment's bounds: clipped, which the policy does not know of (its
            log probabilities are of the unclipped action); squashed by a tanh and scaled; or not at all.

    Raises:
        ConfigError: Squashing needs finite bounds.
    """

    spaces: Spaces
    bounds: ActionBounds = "clip"

    def __post_init__(self) -> None:
        if self.is_squashed and not self.spaces.is_bounded:
            raise ConfigError(
                "control.action_bounds=squash needs finite bounds of every number of an action, and the environment's "
                f"are {self.spaces.action_low} to {self.spaces.action_high}"
            )
        if self.bounds == "squash" and not self.is_continuous:
            raise ConfigError(
                f"control.action_bounds=squash is for numbers; these actions are {self.spaces.action_kind}"
            )

    @property
    def is_continuous(self) -> bool:
        """Whether actions are numbers."""
        return self.spaces.action_kind == "continuous"

    @property
    def is_squashed(self) -> bool:
        """Whether numbers are squashed."""
        return self.is_continuous and self.bounds == "squash"

    def distribution(self, location: Float[Tensor, "n outputs"], log_std: Tensor | None) -> Distribution:
        """The distribution with a location; `log_std` [outputs] for numbers, the same in every state."""
        kind = self.spaces.action_kind
        if kind == "discrete":
            return Categorical(location)
        if kind == "multi_discrete":
            return MultiCategorical(location, self.spaces.action_sizes)
        if kind == "multi_binary":
            return Bernoulli(location)
        assert log_std is not None
        family = SquashedGaussian if self.is_squashed else DiagonalGaussian
        return family(location, log_std.expand_as(location))

    def draw_noise(self, num_steps: int, num_envs: int, generator: torch.Generator) -> Float[Tensor, "time envs k"]:
        """Standard noise of the family for a whole rollout: Gumbel, logistic or normal."""
        shape = (num_steps, num_envs, self.spaces.num_outputs)
        if self.is_continuous:
            return torch.randn(shape, generator=generator)
        # Between the smallest and the largest float inside (0, 1), so that no logarithm is infinite.
        uniform = torch.rand(shape, generator=generator).clamp_(1e-7, 1 - 1e-7)
        if self.spaces.action_kind == "multi_binary":
            return torch.logit(uniform)
        return uniform.log_().neg_().log_().neg_()

    def choose(self, perturbed: Array) -> Array:
        """The action [n, components] of a location plus scaled noise [n, outputs], without making a distribution."""
        kind = self.spaces.action_kind
        if kind == "continuous":
            return perturbed
        if kind == "discrete":
            return perturbed.argmax(-1, keepdims=True)
        if kind == "multi_binary":
            return (perturbed > 0).astype(np.int64)
        ends = np.cumsum(self.spaces.action_sizes)[:-1]
        return np.concatenate([part.argmax(-1, keepdims=True) for part in np.split(perturbed, ends, -1)], -1)

    def executed(self, actions: Array) -> Any:
        """What the environments take, one row each: Python integers for one choice, else an array.

        Args:
            actions: [n, components], float32 for numbers, int64 otherwise.
        """
        kind, spaces = self.spaces.action_kind, self.spaces
        if kind == "discrete":
            [start] = spaces.action_start
            return [row[0] + start for row in actions.tolist()]
        if kind == "continuous":
            actions = self._within_bounds(actions)
        elif kind == "multi_discrete":
            actions = actions + np.asarray(spaces.action_start)
        else:
            actions = actions.astype(np.int8)
        return actions if len(spaces.action_shape) == 1 else actions.reshape(-1, *spaces.action_shape)

    def _within_bounds(self, actions: Array) -> Array:
        """A new array in every case: environments may keep it."""
        if self.bounds == "none":
            return actions.copy()
        low, high = self._limits
        if self.bounds == "squash":
            share = np.float32(0.5) * (np.tanh(actions) + np.float32(1.0))
            return np.minimum(low + (high - low) * share, high)
        return np.minimum(np.maximum(actions, low), high)

    @cached_property
    def _limits(self) -> tuple[Array, Array]:
        low, high = (np.array(each, np.float32) for each in (self.spaces.action_low, self.spaces.action_high))
        return low, high
