"""Running normalization of observations and rewards, frozen while a policy acts and learns.

Observations are standardized by the mean and variance of all observations so far, rewards divided by the standard
deviation of the discounted return so far; both are then clipped. The statistics are Gymnasium's `RunningMeanStd`. Its
wrappers update them in every step, or never; if they changed between sampling and the update, the update would start
from another policy. Here its first ratio is 1, through this order: rollout, `observe_rewards`, experience, update,
`observe`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from gymnasium.wrappers.utils import RunningMeanStd

from kedge_control.spaces import Array
from kedge_control.steps import Steps

RewardScaling = Literal["std", "sign", "none"]

# As in Gymnasium and OpenAI Baselines; it also keeps a constant input finite.
EPSILON = 1e-8

CLIP = 10.0
"""Largest absolute value of a normalized number, as in OpenAI Baselines."""


class Normalization:
    """The statistics of a run's observations and rewards.

    Args:
        observation_size: Numbers of an observation.
        num_envs: Environments; each has a running return.
        observations: Standardize observations; images are unchanged.
        rewards: Divide by the standard deviation of the discounted return; keep only the sign; or leave unchanged.
        gamma: Discount of that return.
    """

    def __init__(
        self,
        observation_size: int,
        num_envs: int = 1,
        *,
        observations: bool = True,
        rewards: RewardScaling = "std",
        gamma: float = 0.99,
    ) -> None:
        self.observations = observations
        self.rewards: RewardScaling = rewards
        self.gamma = gamma
        self.observation_moments = RunningMeanStd(epsilon=0.0, shape=(observation_size,))
        self.return_moments = RunningMeanStd(epsilon=0.0, shape=(1,))
        self._returns: Array = np.zeros(num_envs)
        self._refresh()

    def _refresh(self) -> None:
        moments = self.observation_moments
        self._mean = moments.mean.astype(np.float32)
        self._inverse_std = (1.0 / np.sqrt(moments.var + EPSILON)).astype(np.float32)

    def normalize(self, observations: Array, out: Array | None = None) -> Array:
        """Normalize observations for the policy.

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
        np.minimum(out, CLIP, out=out)
        return np.maximum(out, -CLIP, out=out)

    def scale(self, rewards: Array) -> Array:
        """Scale rewards of any shape for the critic, float32."""
        if self.rewards == "sign":
            return np.sign(rewards).astype(np.float32)
        if self.rewards == "none":
            return rewards.astype(np.float32)
        scaled = rewards / np.sqrt(self.return_moments.var[0] + EPSILON)
        return np.clip(scaled, -CLIP, CLIP).astype(np.float32)

    def observe_rewards(self, steps: Steps) -> None:
        """Add a rollout's rewards to the statistics of the discounted return, before experience is computed."""
        if self.rewards != "std":
            return
        valid = steps.valid
        rewards = np.where(valid, steps.rewards, 0.0)
        ends = steps.terminated | steps.truncated
        begins = np.concatenate([steps.starts[None], ends[:-1]])
        decays = np.where(begins, 0.0, np.where(valid, self.gamma, 1.0))
        returns = np.empty_like(rewards)
        running = self._returns
        for step, (decay, reward) in enumerate(zip(decays, rewards, strict=True)):
            returns[step] = running = running * decay + reward
        self._returns = np.where(ends[-1], 0.0, running)
        self.return_moments.update(returns[valid][:, None])

    def observe(self, steps: Steps) -> None:
        """Add a rollout's observations to the statistics, after the update."""
        if self.observations and steps.observations.dtype != np.uint8 and steps.num_transitions:
            self.observation_moments.update(steps.observations[steps.valid].astype(np.float64))
            self._refresh()

    def state_dict(self) -> dict[str, Any]:
        """The state, as JSON types."""
        return {
            "observations": _state(self.observation_moments),
            "returns": _state(self.return_moments),
            "running_returns": self._returns.tolist(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`; a ValueError if it has other sizes or is not finite."""
        _restore(self.observation_moments, state["observations"])
        _restore(self.return_moments, state["returns"])
        self._returns = np.array(state["running_returns"], np.float64)
        self._refresh()


def _state(moments: RunningMeanStd) -> dict[str, Any]:
    return {"count": moments.count, "mean": moments.mean.tolist(), "var": moments.var.tolist()}


def _restore(moments: RunningMeanStd, state: Mapping[str, Any]) -> None:
    mean, variance = (np.array(state[name], np.float64) for name in ("mean", "var"))
    if not mean.shape == variance.shape == moments.mean.shape:
        raise ValueError(f"statistics of {mean.size} and {variance.size} numbers; expected {moments.mean.size}")
    if not (np.isfinite(mean).all() and np.isfinite(variance).all() and (variance >= 0).all() and state["count"] >= 0):
        raise ValueError("statistics that are not finite, or negative")
    moments.mean = mean
    moments.var = variance
    moments.count = state["count"]
