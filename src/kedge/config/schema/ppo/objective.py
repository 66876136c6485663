"""The policy's part of the PPO loss."""

from typing import Literal

from kedge.config.schema.field import Section, knob

__all__ = ["PpoObjective"]


class PpoObjective(Section):
    """Clipped surrogate and its siblings, entropy bonus, pretraining mix."""

    policy_loss: Literal["clipped", "unclipped", "kl_penalty_fixed", "kl_penalty_adaptive"] = knob(
        "clipped",
        meaning="The surrogate: clipped ratios, plain ratios, or those with a KL penalty to the sampling policy.",
        source="PPO eq. 7; its table 1 has clipping ahead of the others",
    )
    clip_range: float = knob(
        0.2,
        gt=0,
        lt=1,
        meaning="ε: how far a token's probability ratio may move from 1 before its gradient stops.",
        source="PPO, S2, N+",
        too_high="more aggressive updates, at the risk of instability",
        too_low="too cautious: most tokens are clipped and learning is slow",
    )
    clip_range_high: float | None = knob(
        None,
        gt=0,
        meaning="ε upwards, where it differs from clip_range; null takes clip_range for both.",
        source="PPO clips alike on both sides; DAPO takes 0.28",
        too_high="rare tokens that happened to be rewarded grow unchecked",
        too_low="unlikely tokens can hardly become likely, and entropy falls",
    )
    dual_clip: float | None = knob(
        None,
        gt=1,
        meaning="Largest ratio that counts against a token with a negative advantage; null is no bound.",
        source="off in PPO; dual-clip PPO takes 3",
        too_high="no effect",
        too_low="bad tokens that became likely are hardly pushed back",
    )
    surrogate_kl_coef: float = knob(
        1.0,
        ge=0,
        meaning="Weight of the KL to the sampling policy under policy_loss=kl_penalty_*; the adaptive one starts here.",
        source="PPO table 1: best of the fixed ones",
        too_high="the policy hardly moves",
        too_low="nothing holds an update back",
    )
    surrogate_kl_target: float = knob(
        0.01,
        gt=0,
        meaning="Target of that KL, nats per token, under kl_penalty_adaptive.",
        source="PPO table 1: best of the adaptive ones",
        too_high="large, unstable updates",
        too_low="the policy hardly moves",
    )
    aggregation: Literal["token", "sequence", "constant"] = knob(
        "token",
        meaning="How token losses become one: mean over tokens, mean of each response's mean, or sum over a constant "
        "length (rollout.max_new_tokens).",
        source="N+ and S3; Dr. GRPO for constant",
    )
    entropy_coef: float = knob(
        0.0,
        ge=0,
        meaning="Weight of the entropy bonus, per nat of a token's next-token entropy.",
        source="Ziegler, Stiennon, N+. S2 takes 0.01, which suits small action spaces; 0.001 is much for a vocabulary",
        too_high="the policy stays random and never commits; text turns into noise",
        too_low="the policy becomes deterministic too fast and gets stuck",
    )
    entropy_target: float | None = knob(
        None,
        gt=0,
        meaning="Mean entropy, nats per token, towards which entropy_coef adapts from its start; null keeps it fixed.",
        source="S4 (optional there too)",
        too_high="the coefficient grows until the text is noise",
        too_low="the coefficient falls to 0 and has no effect",
    )
    ptx_coef: float = knob(
        0.0,
        ge=0,
        meaning="Weight of the cross-entropy on data.pretraining, added to the same step.",
        source="off; InstructGPT takes 27.8",
        too_high="the run becomes pretraining",
        too_low="what the model knew beside the task is forgotten (the alignment tax)",
    )
    ptx_batch_size: int | None = knob(
        None,
        ge=1,
        meaning="Pretraining texts per optimiser step; null takes as many as the minibatch has responses.",
        source="kedge: InstructGPT takes eight times as many",
        too_high="slow",
        too_low="a noisy pretraining gradient, multiplied by ptx_coef",
    )
