"""The leash to the reference policy: where the KL enters, and who steers its weight."""

from typing import Literal

from kedge.config.schema.field import Section, knob

__all__ = ["PpoKl"]


class PpoKl(Section):
    """β · KL(policy ‖ reference), in the reward or in the loss."""

    kl_coef: float = knob(
        0.05,
        ge=0,
        meaning="β: weight of the KL to the reference, in score per nat; a controller starts here.",
        source="Stiennon and N+",
        too_high="the policy stays the reference, and the score is flat",
        too_low="the policy drifts off into text that fools the reward",
    )
    measure_kl: bool = knob(
        False,
        meaning="Whether the KL to the reference is measured although nothing pays for it (ppo.kl_coef=0); with a KL "
        "to pay it always is.",
        source="kedge: without either no reference model is loaded or run",
    )
    kl_in: Literal["reward", "loss"] = knob(
        "reward",
        meaning="Whether the KL is subtracted from the token rewards or added to the loss.",
        source="S1, S4, Ziegler, InstructGPT, N+; S3 and GRPO have it in the loss",
    )
    kl_scope: Literal["token", "sequence"] = knob(
        "token",
        meaning="In the reward: each token pays its own KL where it arises, or the response pays the sum at its end.",
        source="Ziegler and N+; S1 for sequence",
    )
    kl_estimator: Literal["auto", "k1", "k2", "k3"] = knob(
        "auto",
        meaning="Estimate of a token's KL: k1 is unbiased, k2 has low variance, k3 has both and is never negative; "
        "auto is k1 in the reward and k2 in the loss.",
        source="k1 in the reward: Ziegler, N+. In the loss k2 has the right gradient and k1 none",
    )
    kl_controller: Literal["fixed", "ziegler", "schulman"] = knob(
        "fixed",
        meaning="Who steers β: nobody, Ziegler's proportional controller, or the PPO paper's halving and doubling.",
        source="Stiennon, InstructGPT, N+: fixed",
    )
    kl_target: float = knob(
        6.0,
        gt=0,
        meaning="KL that the controller steers to, nats per response.",
        source="Ziegler",
        too_high="β falls to almost nothing, and the policy drifts off",
        too_low="β grows until the policy cannot learn",
    )
    kl_wait_fraction: float = knob(
        0.1,
        ge=0,
        lt=1,
        meaning="Share of the updates before the controller first acts.",
        source="kedge: at first the KL is small because the policy has just left, not because β is large. The papers' "
        "controllers act at once, over runs so long that it makes no difference",
        too_high="the KL is far beyond its target when the controller wakes up",
        too_low="β falls at first, and the KL overshoots its target",
    )
    kl_horizon: int | None = knob(
        None,
        gt=0,
        meaning="Ziegler's controller: responses over which β may change by a factor of about 1.2; null is automatic.",
        source="kedge. Ziegler takes 10,000, for a run of a million responses",
        too_high="β is too slow for the KL to reach its target within the run",
        too_low="β swings and the KL overshoots",
    )
