"""`ppo`: one flat section, declared in five files by subject, and the combinations that it refuses."""

from typing import Literal

from pydantic import model_validator

from kedge.config.schema.ppo.critic import PpoCritic
from kedge.config.schema.ppo.guard import PpoGuard
from kedge.config.schema.ppo.kl import PpoKl
from kedge.config.schema.ppo.loop import PpoLoop
from kedge.config.schema.ppo.objective import PpoObjective

__all__ = ["Ppo"]


class Ppo(PpoGuard, PpoCritic, PpoKl, PpoObjective, PpoLoop):
    """The PPO update: loop, policy loss, KL to the reference, critic, guard."""

    @property
    def value_weight(self) -> float:
        """What multiplies half the squared error: value_coef, twice that where value_loss does not halve."""
        return self.value_coef * (2.0 if self.value_loss == "mse" else 1.0)

    @property
    def resolved_kl_estimator(self) -> Literal["k1", "k2", "k3"]:
        """The estimator of the KL, `auto` resolved: without bias in the reward, with the right gradient in the loss."""
        if self.kl_estimator != "auto":
            return self.kl_estimator
        return "k1" if self.kl_in == "reward" else "k2"

    @property
    def needs_reference(self) -> bool:
        """Whether a reference model takes part: something is paid for the KL to it, or it is measured."""
        return self.kl_coef > 0 or self.measure_kl

    @model_validator(mode="after")
    def _check_kl(self) -> "Ppo":
        if self.kl_controller != "fixed" and self.kl_coef == 0:
            raise ValueError(
                f"ppo.kl_controller={self.kl_controller} multiplies ppo.kl_coef, which is 0; start it at e.g. 0.05"
            )
        if self.kl_in == "loss" and self.kl_scope == "sequence":
            raise ValueError("ppo.kl_scope=sequence is about the reward; with ppo.kl_in=loss it must be token")
        if self.kl_in == "loss" and self.kl_estimator == "k1" and self.kl_coef > 0:
            raise ValueError("ppo.kl_estimator=k1 has no gradient on average as a loss; ppo.kl_in=loss needs k2 or k3")
        return self

    @model_validator(mode="after")
    def _check_objective(self) -> "Ppo":
        clip_only = {"ppo.clip_range_high": self.clip_range_high, "ppo.dual_clip": self.dual_clip}
        for name, value in clip_only.items():
            if value is not None and self.policy_loss != "clipped":
                raise ValueError(
                    f"{name}={value} clips, and ppo.policy_loss={self.policy_loss} does not; "
                    "leave it out or use ppo.policy_loss=clipped"
                )
        return self

    @model_validator(mode="after")
    def _check_critic(self) -> "Ppo":
        if self.critic == "shared" and self.critic_init == "reward":
            raise ValueError("ppo.critic_init=reward needs a critic of its own: set ppo.critic=separate")
        if 0 < self.num_updates <= self.value_warmup_updates:
            raise ValueError(
                f"ppo.value_warmup_updates={self.value_warmup_updates} leaves no update for the policy; "
                f"it must be below ppo.num_updates={self.num_updates}"
            )
        return self
