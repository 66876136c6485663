"""The weights that move during a PPO run, and the controllers that move them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from kedge.algorithm.experience import Experience
from kedge.algorithm.kl import adapt_entropy_coef, adapt_kl_coef_schulman, adapt_kl_coef_ziegler
from kedge.config import Config, PpoConfig
from kedge.training.objective import Objective, Surrogate

__all__ = ["Coefficients"]

SURROGATES: dict[str, Surrogate] = {
    "clipped": "clipped",
    "unclipped": "unclipped",
    "kl_penalty_fixed": "kl_penalty",
    "kl_penalty_adaptive": "kl_penalty",
}
ADAPTING = ("update", "kl_coef", "entropy_coef", "surrogate_kl_coef")
ZIEGLER_HORIZON = 10_000
MIN_SPREAD = 1e-3
"""Returns that spread less are as good as constant; they are not blown up to look as if they differed."""


def _automatic_horizon(config: Config) -> int:
    """Ziegler's horizon, but at most 1/30 of the run.

    An update of n responses changes β by at most a factor 1 ± 0.2·n/horizon. At 10,000 a run of a few thousand
    responses would end before β has moved; at 1/30 of the run β can change by e^6 in its course, one way or the other.
    """
    return max(1, min(ZIEGLER_HORIZON, config.ppo.loop.num_updates * config.responses_per_update // 30))


def _spread(returns: Tensor) -> float:
    """Their standard deviation, away from 0."""
    return max(float(returns.std(correction=0)), MIN_SPREAD)


@dataclass(frozen=True)
class Coefficients:
    """What one update is weighed by. `adapt` gives the next update's.

    Attributes:
        ppo: The settings that say who moves what.
        update: Which update they are for, from 1.
        horizon: Responses over which Ziegler's controller acts.
        kl_coef: β of the KL to the reference.
        entropy_coef: c_e of the entropy bonus.
        surrogate_kl_coef: β of the KL-penalty surrogate, to the sampling policy.
        constant_length: Divisor of the `constant` aggregation, in tokens.
    """

    ppo: PpoConfig
    update: int
    horizon: int
    kl_coef: float
    entropy_coef: float
    surrogate_kl_coef: float
    constant_length: int

    @classmethod
    def start(cls, config: Config) -> Coefficients:
        """The first update's, as configured."""
        ppo = config.ppo
        return cls(
            ppo=ppo,
            update=1,
            horizon=ppo.kl.kl_horizon or _automatic_horizon(config),
            kl_coef=ppo.kl.kl_coef,
            entropy_coef=ppo.objective.entropy_coef,
            surrogate_kl_coef=ppo.objective.surrogate_kl_coef,
            constant_length=config.rollout.max_new_tokens,
        )

    def state(self) -> dict[str, float]:
        """What adapts, as plain numbers for a checkpoint."""
        return {name: getattr(self, name) for name in ADAPTING}

    def restore(self, state: Mapping[str, float]) -> Coefficients:
        """Go on exactly where `state` was taken."""
        return replace(self, **state)

    @property
    def reward_kl_coef(self) -> float:
        """β of the KL in the reward; 0 where it is in the loss."""
        return self.kl_coef if self.ppo.kl.kl_in == "reward" else 0.0

    def objective(self, experience: Experience) -> Objective:
        """The total loss of one update with these weights.

        Args:
            experience: Its returns may be the unit of the value loss.
        """
        ppo = self.ppo
        return Objective(
            policy_loss=SURROGATES[ppo.objective.policy_loss],
            clip_range=ppo.objective.clip_range,
            clip_range_high=ppo.objective.clip_range_high,
            dual_clip=ppo.objective.dual_clip,
            surrogate_kl_coef=self.surrogate_kl_coef,
            value_clip_range=ppo.value.value_clip_range,
            value_coef=ppo.value.value_weight,
            entropy_coef=self.entropy_coef,
            kl_coef=self.kl_coef if ppo.kl.kl_in == "loss" else 0.0,
            kl_estimator=ppo.kl.resolved_kl_estimator,
            aggregation=ppo.objective.aggregation,
            constant_length=self.constant_length,
            value_unit=1.0 if ppo.value.value_unit == "score" else _spread(experience.returns[experience.reward_mask]),
            value_after_last=ppo.advantages.score_at == "after_last",
        )

    def metrics(self) -> dict[str, float]:
        """The weights that this update was made with."""
        return {"objective/kl_coef": self.kl_coef, "objective/entropy_coef": self.entropy_coef}

    def adapt(self, metrics: Mapping[str, float], *, num_responses: int) -> Coefficients:
        """The next update's weights, from this one's figures; after the PPO step, as published.

        Source: spec §5.21, §6.27, §6.29.
        """
        ppo, adapted = self.ppo, replace(self, update=self.update + 1)
        awake = self.update > ppo.kl.kl_wait_fraction * ppo.loop.num_updates
        # Absent without a reference, whose KL no controller steers then. A sampled KL can come out below 0; the
        # divergence it estimates cannot be.
        kl = max(metrics.get("objective/kl", 0.0), 0.0)
        if awake and ppo.kl.kl_controller == "ziegler":
            beta = adapt_kl_coef_ziegler(
                self.kl_coef, kl, kl_target=ppo.kl.kl_target, num_episodes=num_responses, horizon=self.horizon
            )
            adapted = replace(adapted, kl_coef=beta)
        elif awake and ppo.kl.kl_controller == "schulman":
            adapted = replace(adapted, kl_coef=adapt_kl_coef_schulman(self.kl_coef, kl, kl_target=ppo.kl.kl_target))
        if ppo.objective.entropy_target is not None:
            coef = adapt_entropy_coef(
                self.entropy_coef, metrics["policy/entropy"], entropy_target=ppo.objective.entropy_target
            )
            adapted = replace(adapted, entropy_coef=coef)
        if ppo.objective.policy_loss == "kl_penalty_adaptive":
            coef = adapt_kl_coef_schulman(
                self.surrogate_kl_coef, metrics["policy/distance_moved"], kl_target=ppo.objective.surrogate_kl_target
            )
            adapted = replace(adapted, surrogate_kl_coef=coef)
        return adapted
