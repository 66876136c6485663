"""Actions: the distribution given by a policy's outputs, and conversion to the environment's format.

An action is chosen by adding noise to the outputs: the largest of logits + Gumbel noise, a switch where logits +
logistic noise > 0, or mean + σ·normal noise. The noise of a whole rollout is drawn at once, so that a step only needs
an addition. With noise of 0, the action is the most probable one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Normal, TanhTransform, kl_divergence

from kedge_base.errors import ConfigError
from kedge_control.spaces import Array, Spaces

ActionBounds = Literal["clip", "squash", "none"]

# 24 nodes: the entropy of a squashed number is exact to 1e-4 nats for σ up to 2.
_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(24)
NODES = torch.tensor(_NODES, dtype=torch.float32)
WEIGHTS = torch.tensor(_WEIGHTS / _WEIGHTS.sum(), dtype=torch.float32)


@dataclass(frozen=True)
class ActionDistribution:
    """A distribution of actions in each of n states, of independent components.

    A squashed number is kept as u, before its tanh, so that its density is also exact at the bounds.

    Attributes:
        parts: A distribution [n] for every choice, or one [n, components] of all switches or numbers.
        is_squashed: An action is u and is played as its tanh, scaled to the bounds.
    """

    parts: tuple[Categorical, ...] | tuple[Bernoulli] | tuple[Normal]
    is_squashed: bool = False

    @property
    def parameters(self) -> Float[Tensor, "n parameters"]:
        """All parameters, from which `ActionHead.restored` reconstructs it: logits, or means followed by σ."""
        tables = ([part.loc, part.scale] if isinstance(part, Normal) else [part.logits] for part in self.parts)
        return torch.cat(list(itertools.chain(*tables)), -1)

    def log_prob(self, actions: Tensor) -> Float[Tensor, " n"]:
        """Log probability or density of the actions [n, components], nats, summed over components."""
        is_choice = isinstance(self.parts[0], Categorical)
        columns = actions.unbind(-1) if is_choice else (actions.float(),)
        found = _joint(part.log_prob(column) for part, column in zip(self.parts, columns, strict=True))
        return found - _log_slope(actions).sum(-1) if self.is_squashed else found

    def entropy(self) -> Float[Tensor, " n"]:
        """Entropy in nats, summed over components; E log(1 − tanh² u) by Gauss-Hermite quadrature."""
        found = _joint(part.entropy() for part in self.parts)
        if not self.is_squashed:
            return found
        [normal] = self.parts
        u = normal.mean.unsqueeze(-1) + normal.stddev.unsqueeze(-1) * NODES.to(normal.mean)
        return found + (_log_slope(u) @ WEIGHTS.to(u)).sum(-1)

    def kl_from(self, old: ActionDistribution) -> Float[Tensor, " n"]:
        """KL(old ‖ this), nats; squashed numbers have the KL of the normal ones, since tanh is one-to-one."""
        return _joint(kl_divergence(one, other) for one, other in zip(old.parts, self.parts, strict=True))


def _joint(numbers: Iterable[Tensor]) -> Float[Tensor, " n"]:
    """Sum over components, which are tables or columns."""
    first, *others = (each if each.ndim == 1 else each.sum(-1) for each in numbers)
    for each in others:
        first = first + each
    return first


def _log_slope(u: Tensor) -> Tensor:
    """log(1 − tanh² u), also exact for large u.

    Source: Haarnoja et al. 2018 (arXiv 1801.01290), appendix C, rewritten so that no digits are lost at the bounds.
    """
    return TanhTransform().log_abs_det_jacobian(u, u)


@dataclass(frozen=True)
class ActionHead:
    """The family of an environment's actions.

    Args:
        spaces: Of the environment.
        bounds: Method that keeps numbers within the environment's bounds: clipped after the policy (its log
            probabilities are of the unclipped action); squashed by a tanh and scaled; or not at all.

    Raises:
        ConfigError: Squashing needs numbers with finite bounds.
    """

    spaces: Spaces
    bounds: ActionBounds = "clip"

    def __post_init__(self) -> None:
        if self.bounds != "squash":
            return
        if not self.is_continuous:
            raise ConfigError(
                f"control.action_bounds=squash is for numbers; these actions are {self.spaces.action_kind}"
            )
        if not self.spaces.is_bounded:
            raise ConfigError(
                "control.action_bounds=squash needs finite bounds of every number of an action, and the environment's "
                f"are {self.spaces.action_low} to {self.spaces.action_high}"
            )

    @property
    def is_continuous(self) -> bool:
        """True if actions are numbers."""
        return self.spaces.action_kind == "continuous"

    def distribution(self, location: Float[Tensor, "n outputs"], log_std: Tensor | None) -> ActionDistribution:
        """Make the distribution with this location; `log_std` [outputs] for numbers."""
        if log_std is not None:
            return self._normal(location, log_std.exp())
        if self.spaces.action_kind == "multi_binary":
            return ActionDistribution((Bernoulli(logits=location, validate_args=False),))
        logits = location.split(self.spaces.action_sizes, -1)
        return ActionDistribution(tuple(Categorical(logits=each, validate_args=False) for each in logits))

    def _normal(self, mean: Tensor, std: Tensor) -> ActionDistribution:
        return ActionDistribution((Normal(mean, std, validate_args=False),), self.bounds == "squash")

    def restored(self, parameters: Float[Tensor, "n parameters"]) -> ActionDistribution:
        """Make the distribution with these `ActionDistribution.parameters`."""
        return self._normal(*parameters.chunk(2, -1)) if self.is_continuous else self.distribution(parameters, None)

    def draw_noise(self, num_steps: int, num_envs: int, generator: torch.Generator) -> Float[Tensor, "time envs k"]:
        """Draw the family's standard noise for a whole rollout: Gumbel, logistic or normal."""
        shape = (num_steps, num_envs, self.spaces.num_outputs)
        if self.is_continuous:
            return torch.randn(shape, generator=generator)
        # Between the smallest and the largest float inside (0, 1), so that no logarithm is infinite.
        uniform = torch.rand(shape, generator=generator).clamp_(1e-7, 1 - 1e-7)
        if self.spaces.action_kind == "multi_binary":
            return torch.logit(uniform)
        return uniform.log_().neg_().log_().neg_()

    def choose(self, perturbed: Array) -> Array:
        """Return the action [n, components] of a location plus scaled noise [n, outputs], without making a
        distribution.
        """
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
        """Convert actions to the environments' format, one entry per row: a Python integer for one choice, else an
        array.

        Args:
            actions: [n, components], float32 for numbers, int64 otherwise.
        """
        kind = self.spaces.action_kind
        spaces = self.spaces
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
        """Move actions within the bounds. Always returns a new array, because environments may keep it."""
        if self.bounds == "none":
            return actions.copy()
        low, high = self._limits
        if self.bounds == "squash":
            share = np.float32(0.5) * (np.tanh(actions) + np.float32(1.0))
            return np.minimum(low + (high - low) * share, high)
        return np.minimum(np.maximum(actions, low), high)

    @cached_property
    def _limits(self) -> tuple[Array, Array]:
        """The bounds in float32; those that float32 does not have are rounded inwards."""
        return _inwards(self.spaces.action_low, np.less, np.inf), _inwards(self.spaces.action_high, np.greater, -np.inf)


def _inwards(bounds: Sequence[float], is_outside: np.ufunc, inside: float) -> Array:
    exact = np.array(bounds)
    near = exact.astype(np.float32)
    return np.where(is_outside(near, exact), np.nextafter(near, np.float32(inside)), near)
