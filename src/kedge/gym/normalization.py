"""Running normalization of observations and rewards, frozen while a policy acts and learns.

Observations are standardized by the mean and variance of all observations so far, rewards divided by the standard
deviation of the discounted return so far; both are then clipped. If the statistics moved between sampling and the
update, the policy would be another one in its first step; here its first ratio is 1. So the order is: rollout,
`observe_rewards`, experience, update, `observe`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch

from kedge.errors import ConfigError

if TYPE_CHECKING:
    from kedge.gym.rollout import Steps

__all__ = ["Normalization", "RewardScaling", "RunningMoments"]

RewardScaling = Literal["std", "sign", "none"]

Array = np.ndarray[Any, Any]

# As in Gymnasium and baselines; it also keeps a constant input finite.
EPSILON = 1e-8


class RunningMoments:
    """Mean and variance of all rows so far, in float64.

    Two groups are merged exactly: with the difference d of their means,
    M₂ = M₂ᵃ + M₂ᵇ + d²·nᵃ·nᵇ / (nᵃ + nᵇ), where M₂ = n·variance.

    Args:
        size: Numbers of a row.

    Source: Chan, Golub and LeVeque 1983.
    """

    def __init__(self, size: int) -> None:
        self.count = 0
        self.mean: Array = np.zeros(size)
        self._squares: Array = np.zeros(size)

    @property
    def variance(self) -> Array:
        """Population variance [size]; 1 before the first row."""
        return self._squares / self.count if self.count else np.ones_like(self._squares)

    def update(self, rows: Array) -> None:
        """Add rows [n, size]."""
        if not len(rows):
            return
        rows = rows.astype(np.float64, copy=False)
        mean, count = rows.mean(0), len(rows)
        total, moved = self.count + count, mean - self.mean
        self._squares = self._squares + np.square(rows - mean).sum(0) + np.square(moved) * (self.count * count / total)
        self.mean, self.count = self.mean + moved * (count / total), total

    def state_dict(self) -> dict[str, Any]:
        """The state, as JSON types."""
        return {"count": self.count, "mean": self.mean.tolist(), "squares": self._squares.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`; a ValueError if it is of other numbers, or not finite."""
        mean, squares = np.array(state["mean"], np.float64), np.array(state["squares"], np.float64)
        if not mean.shape == squares.shape == self.mean.shape:
            raise ValueError(f"statistics of {mean.size} and {squares.size} numbers; expected {self.mean.size}")
        count = int(state["count"])
        if not (np.isfinite(mean).all() and np.isfinite(squares).all() and (squares >= 0).all() and count >= 0):
            raise ValueError("statistics that are not finite, or negative")
        self.count, self.mean, self._squares = count, mean, squares


class Normalization:
    """The statistics of a run's observations and rewards.

    Args:
        observation_size: Numbers of an observation.
        num_envs: Environments; each has a running return.
        observations: Standardize observations; images stay as they are.
        rewards: Divide by the standard deviation of the discounted return; keep only the sign; or leave them.
        gamma: Discount of that return.
        clip: Largest size of a normalized number.

    Raises:
        ConfigError: `rewards` is unknown, or `clip` is not above 0.
    """

    def __init__(
        self,
        observation_size: int,
        num_envs: int = 1,
        *,
        observations: bool = True,
        rewards: RewardScaling = "std",
        gamma: float = 0.99,
        clip: float = 10.0,
    ) -> None:
        self.observations, self.gamma, self.clip = bool(observations), float(gamma), float(clip)
        if not self.clip > 0 or rewards not in get_args(RewardScaling):
            raise ConfigError(f"normalization: rewards={rewards!r}, clip={clip}; expected a clip above 0")
        self.rewards: RewardScaling = rewards
        self.observation_moments = RunningMoments(observation_size)
        self.return_moments = RunningMoments(1)
        self._returns: Array = np.zeros(num_envs)
        self._refresh()

    @property
    def settings(self) -> dict[str, Any]:
        """The keyword arguments that it was made with, as JSON types."""
        return {name: getattr(self, name) for name in ("observations", "rewards", "gamma", "clip")}

    def _refresh(self) -> None:
        moments = self.observation_moments
        self._mean = moments.mean.astype(np.float32)
        self._inverse_std = (1.0 / np.sqrt(moments.variance + EPSILON)).astype(np.float32)

    def normalize(self, observations: Array, out: Array | None = None) -> Array:
        """Observations as the policy reads them.

        Args:
            observations: [n, …]; images pass unchanged.
            out: Where to write the result [n, d], float32; None for a new array.
        """
        if observations.dtype == np.uint8:
            return observations
        if out is None:
            out = np.empty(observations.shape, np.float32)
        if not self.observations:
            np.copyto(out, observations, casting="unsafe")
            return out
        np.subtract(observations, self._mean, out=out)
        np.multiply(out, self._inverse_std, out=out)
        np.minimum(out, self.clip, out=out)
        return np.maximum(out, -self.clip, out=out)

    def scale(self, rewards: Array) -> Array:
        """Rewards of any shape as the critic learns them, float32."""
        if self.rewards == "sign":
            return np.sign(rewards).astype(np.float32)
        if self.rewards == "none":
            return rewards.astype(np.float32)
        scaled = rewards / np.sqrt(self.return_moments.variance[0] + EPSILON)
        return np.clip(scaled, -self.clip, self.clip).astype(np.float32)

    def observe_rewards(self, steps: Steps) -> None:
        """Add a rollout's rewards to the statistics of the discounted return; before the experience is made."""
        if self.rewards != "std":
            return
        valid = steps.valid.numpy()
        rewards = np.where(valid, steps.rewards.numpy(), 0.0)
        ends = (steps.terminated | steps.truncated).numpy()
        begins = np.concatenate([steps.starts.numpy()[None], ends[:-1]])
        decays = np.where(begins, 0.0, np.where(valid, self.gamma, 1.0))
        returns, running = np.empty_like(rewards), self._returns
        for step, (decay, reward) in enumerate(zip(decays, rewards, strict=True)):
            returns[step] = running = running * decay + reward
        self._returns = np.where(ends[-1], 0.0, running)
        self.return_moments.update(returns[valid][:, None])

    def observe(self, steps: Steps) -> None:
        """Add a rollout's observations; after the update."""
        if self.observations and steps.observations.dtype != torch.uint8:
            self.observation_moments.update(steps.observations.numpy()[steps.valid.numpy()])
            self._refresh()

    def state_dict(self) -> dict[str, Any]:
        """The state, as JSON types."""
        return {
            "observations": self.observation_moments.state_dict(),
            "returns": self.return_moments.state_dict(),
            "running_returns": self._returns.tolist(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`."""
        self.observation_moments.load_state_dict(state["observations"])
        self.return_moments.load_state_dict(state["returns"])
        self._returns = np.array(state["running_returns"], np.float64)
        self._refresh()
