"""The coefficients that change during a PPO run, and the controllers that change them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from kedge.algorithm.kl import adapt_entropy_coef, adapt_kl_coef_schulman, adapt_kl_coef_ziegler

__all__ = ["Coefficients", "Controllers", "KLController"]

KLController = Literal["fixed", "ziegler", "schulman"]


@dataclass(frozen=True)
class Controllers:
    """Which coefficients adapt, and towards what.

    Attributes:
        kl: The controller of β: none, Ziegler's, or the PPO paper's.
        kl_target: Wanted KL to the reference, nats per response.
        kl_horizon: Responses within which Ziegler's controller may change β by a fifth.
        kl_wait_updates: Updates before β first changes; may be a fraction.
        entropy_target: Wanted entropy, nats per token; None keeps the entropy coefficient.
        surrogate_kl_target: Wanted distance of one update, nats per token; None keeps the surrogate's β.
    """

    kl: KLController
    kl_target: float
    kl_horizon: int
    kl_wait_updates: float
    entropy_target: float | None = None
    surrogate_kl_target: float | None = None


@dataclass
class Coefficients:
    """The weights of the loss terms in the current update; `adapt` moves on to the next update.

    Attributes:
        controllers: What changes them.
        kl_coef: β of the KL to the reference.
        entropy_coef: c_e of the entropy bonus.
        surrogate_kl_coef: β of the KL-penalty surrogate, to the sampling policy.
        update: Which update they are for, from 1.
    """

    controllers: Controllers
    kl_coef: float
    entropy_coef: float
    surrogate_kl_coef: float
    update: int = 1

    def metrics(self) -> dict[str, float]:
        """The coefficients of the current update."""
        return {"objective/kl_coef": self.kl_coef, "objective/entropy_coef": self.entropy_coef}

    def adapt(self, metrics: Mapping[str, float], *, num_responses: int) -> None:
        """Move on to the next update, after the PPO step, as published.

        Args:
            metrics: The update's.
            num_responses: Responses that it was trained on.

        Source: spec §5.21, §6.27, §6.29.
        """
        use = self.controllers
        # Absent without a reference. A sampled KL can come out below 0; the divergence that it estimates cannot be.
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
        """What adapts, as plain numbers."""
        return {
            "update": self.update,
            "kl_coef": self.kl_coef,
            "entropy_coef": self.entropy_coef,
            "surrogate_kl_coef": self.surrogate_kl_coef,
        }

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from `state`."""
        self.update = int(state["update"])
        self.kl_coef, self.entropy_coef = state["kl_coef"], state["entropy_coef"]
        self.surrogate_kl_coef = state["surrogate_kl_coef"]
