"""The KL penalty to the reference policy, and the controller of its weight."""

from typing import Literal

from pydantic import model_validator

from kedge.config.schema.field import field
from kedge.config.schema.section import Group

__all__ = ["KlConfig"]


class KlConfig(Group):
    """β · KL(policy ‖ reference), in the reward or in the loss."""

    kl_coef: float = field(
        0.05,
        ge=0,
        meaning="β: weight of the KL to the reference, in score per nat; the start value if kl_controller adapts it.",
        source="Stiennon and N+",
        too_high="the policy stays close to the reference, and the score is flat",
        too_low="the policy drifts into text that exploits the reward",
    )
    measure_kl: bool = field(
        False,
        meaning="Whether to measure the KL to the reference even if it is not penalized (ppo.kl_coef=0).",
        source="kedge: if off and ppo.kl_coef=0, no reference model is loaded",
    )
    kl_in: Literal["reward", "loss"] = field(
        "reward",
        meaning="Whether the KL is subtracted from the token rewards or added to the loss. ppo.advantage=grpo needs "
        "loss: it would divide the KL, with the rest of the reward, by the standard deviation in the group.",
        source="S1, S4, Ziegler, InstructGPT, N+; S3 and GRPO put it in the loss",
    )
    kl_scope: Literal["token", "sequence"] = field(
        "token",
        meaning="In the reward: each token is charged its own KL, or the last token is charged the sum.",
        source="Ziegler and N+; S1 for sequence",
    )
    kl_estimator: Literal["auto", "k1", "k2", "k3"] = field(
        "auto",
        meaning="Estimator of a token's KL: k1 is unbiased, k2 has low variance, k3 has both and is never negative; "
        "auto is k1 in the reward and k2 in the loss.",
        source="Ziegler, N+: k1 in the reward. In the loss k2 has the right gradient, and k1 has none on average",
    )
    kl_controller: Literal["fixed", "ziegler", "schulman"] = field(
        "fixed",
        meaning="How β changes: not at all, by Ziegler's proportional controller, or by the PPO paper's halving and "
        "doubling.",
        source="Stiennon, InstructGPT, N+",
    )
    kl_target: float = field(
        6.0,
        gt=0,
        meaning="Target KL of the controller, in nats per response.",
        source="Ziegler",
        too_high="β falls to almost 0, and the policy drifts away",
        too_low="β grows until the policy cannot learn",
    )
    kl_wait_fraction: float = field(
        0.1,
        ge=0,
        lt=1,
        meaning="Fraction of the policy's updates before the controller starts; ppo.value_warmup_updates come first.",
        source="kedge: early on the KL is small because the policy has just started, not because β is large. The "
        "papers' controllers start immediately, which makes no difference in runs as long as theirs",
        too_high="the KL is far above its target when the controller starts",
        too_low="β falls at first, and the KL overshoots its target",
    )
    kl_horizon: int | None = field(
        None,
        gt=0,
        meaning="Ziegler's controller: responses over which β may change by a factor of about 1.2; null is 1/30 of the "
        "policy's updates, at most 10,000.",
        source="kedge; Ziegler uses 10,000, for a run of two million responses",
        too_high="β changes too slowly for the KL to reach its target within the run",
        too_low="β oscillates and the KL overshoots",
    )

    @property
    def resolved_kl_estimator(self) -> Literal["k1", "k2", "k3"]:
        """The estimator, `auto` resolved: unbiased in the reward, the right gradient in the loss."""
        if self.kl_estimator != "auto":
            return self.kl_estimator
        return "k1" if self.kl_in == "reward" else "k2"

    @property
    def needs_reference(self) -> bool:
        """Whether a reference model is needed: its KL is penalized or measured."""
        return self.kl_coef > 0 or self.measure_kl

    @model_validator(mode="after")
    def _check(self) -> "KlConfig":
        if self.kl_controller != "fixed" and self.kl_coef == 0:
            raise ValueError(
                f"ppo.kl_controller={self.kl_controller} scales ppo.kl_coef, which is 0; start from e.g. 0.05"
            )
        if self.kl_in == "loss" and self.kl_scope == "sequence":
            raise ValueError("ppo.kl_scope=sequence needs ppo.kl_in=reward; ppo.kl_in=loss needs ppo.kl_scope=token")
        if self.kl_in == "loss" and self.kl_estimator == "k1" and self.kl_coef > 0:
            raise ValueError("ppo.kl_estimator=k1 has no gradient on average as a loss; ppo.kl_in=loss needs k2 or k3")
        return self
