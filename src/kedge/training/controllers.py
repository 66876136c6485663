"""Loss coefficients of a PPO run, and the controllers that adapt them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from kedge.algorithm.kl import adapt_entropy_coef, adapt_kl_coef_schulman, adapt_kl_coef_ziegler

__all__ = ["Coefficients", "Controllers", "KLController"]

KLController = Literal["fixed", "ziegler", "schulman"]


@dataclass(frozen=True)
class Controllers:
    """Which coefficients adapt, and their targets.

    Attributes:
        kl: The controller of β: `fixed`, Ziegler's, or Schulman's (the PPO paper's).
        kl_target: Target KL to the reference, nats per response.
        kl_horizon: Responses over which Ziegler's controller may change β by 20 %.
        kl_wait_updates: Updates of the policy before β first changes; can be a fraction.
        entropy_target: Target entropy, nats per token; None keeps the entropy coefficient fixed.
        surrogate_kl_target: Target KL of one update, nats per token; None keeps the surrogate's β fixed.
    """

    kl: KLController
    kl_target: float
    kl_horizon: int
    kl_wait_updates: float
    entropy_target: float | None = None
    surrogate_kl_target: float | None = None


@dataclass
class Coefficients:
    """The coefficients of the current update; `adapt` changes them for the next one.

    They adapt after an update of the policy only: what a frozen policy does says nothing about its coefficients.

    Attributes:
        controllers: How they adapt.
        kl_coef: β of the KL to the reference.
        entropy_coef: c_e of the entropy bonus.
        surrogate_kl_coef: β of the KL to the sampling policy, in the KL-penalty surrogate.
        update: The update of the policy that they are for, from 1.
    """

    controllers: Controllers
    kl_coef: float
    entropy_coef: float
    surrogate_kl_coef: float
    update: int = 1

    def metrics(self) -> dict[str, float]:
        """The coefficients of the current update."""
        adapting = self.controllers.surrogate_kl_target is not None
        surrogate = {"policy/surrogate_kl_coef": self.surrogate_kl_coef} if adapting else {}
        return {"objective/kl_coef": self.kl_coef, "objective/entropy_coef": self.entropy_coef, **surrogate}

    def adapt(self, metrics: Mapping[str, float], *, num_responses: int) -> None:
        """Adapt the coefficients for the next update, from the metrics of this one, which trained the policy.

        Args:
            metrics: The update's metrics.
            num_responses: Responses in the update.

        Source: spec §5.21, §6.27, §6.29.
        """
        use = self.controllers
        # Missing without a reference. The sampled estimate can be negative, the true KL cannot.
        kl = max(metrics.get("objective/kl", 0.0), 0.0)
        if self.update > use.kl_wait_updates and use.kl == "ziegler":
            self.kl_coef = adapt_kl_coef_ziegler(
                self.kl_coef, kl, kl_target=use.kl_target, num_episodes=num_responses, horizon=use.kl_horizon
            )
        elif self.update > use.kl_wait_updates and use.kl == "schulman":
            self.kl_coef = adapt_kl_coef_schulman(self.kl_coef, kl, kl_target=use.kl_target)
        if use.entropy_target is not None:
            self.entropy_coef = adapt_entropy_coef(
                self.entropy_coef, metrics["policy/entropy"], entropy_target=use.entropy_target
            )
        if use.surrogate_kl_target is not None:
            self.surrogate_kl_coef = adapt_kl_coef_schulman(
                self.surrogate_kl_coef, metrics["policy/distance_moved"], kl_target=use.surrogate_kl_target
            )
        self.update += 1

    def state_dict(self) -> dict[str, float]:
        """The coefficients and the update number."""
        return {
            "update": self.update,
            "kl_coef": self.kl_coef,
            "entropy_coef": self.entropy_coef,
            "surrogate_kl_coef": self.surrogate_kl_coef,
        }

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore a `state_dict`."""
        self.update = int(state["update"])
        self.kl_coef, self.entropy_coef = state["kl_coef"], state["entropy_coef"]
        self.surrogate_kl_coef = state["surrogate_kl_coef"]
