"""The losses and advantages of a control run."""

from typing import Literal

from kedge.config.schema.field import field
from kedge.config.schema.section import Section

__all__ = ["ControlObjectiveConfig"]


class ControlObjectiveConfig(Section):
    """The total loss: policy + value_coef · value − entropy_coef · entropy; and what weighs the policy's steps."""

    policy_loss: Literal["clipped", "unclipped", "kl_penalty_fixed", "kl_penalty_adaptive"] = field(
        "clipped",
        meaning="Surrogate loss: clipped ratios, plain ratios, or plain ratios with a KL penalty to the policy that "
        "played. The KL is that of the whole distributions.",
        source="PPO eq. 7; clipping is the best in its table 1",
    )
    clip_range: float = field(
        0.2,
        gt=0,
        lt=1,
        meaning="ε: how far an action's probability ratio may move from 1 before its gradient is cut.",
        source="PPO",
        too_high="more aggressive updates, at the risk of instability",
        too_low="most steps are clipped and learning is slow",
    )
    anneal_clip_range: bool = field(
        False,
        meaning="Whether ε falls to 0 with the learning rate.",
        source="PPO: on Atari",
    )
    surrogate_kl_coef: float = field(
        1.0,
        ge=0,
        meaning="β of policy_loss=kl_penalty_*; its start for the adaptive one.",
        source="PPO table 1: 3 is the best fixed value, the adaptive one starts at 1",
        too_high="the policy hardly moves",
        too_low="nothing limits the size of an update",
    )
    surrogate_kl_target: float = field(
        0.01,
        gt=0,
        meaning="Target of the KL of one update, nats per step, for policy_loss=kl_penalty_adaptive.",
        source="PPO table 1: the best adaptive value",
        too_high="large, unstable updates",
        too_low="the policy hardly moves",
    )
    entropy_coef: float = field(
        0.0,
        ge=0,
        meaning="Weight of the entropy bonus, per nat.",
        source="PPO: 0 on MuJoCo, 0.01 on Atari",
        too_high="the policy stays random",
        too_low="the policy becomes deterministic too fast and gets stuck",
    )
    value_coef: float = field(
        0.5,
        ge=0,
        meaning="Weight of the value loss, half the squared error. Without effect on the policy where the critic is "
        "separate.",
        source="Stable-Baselines3, CleanRL: 0.5 of the squared error",
        too_high="a shared network serves the critic rather than the policy",
        too_low="the critic learns slowly",
    )
    value_clip_range: float | None = field(
        None,
        gt=0,
        meaning="How far a value may move in an update before its gradient is cut, in normalized rewards; null: no "
        "limit.",
        source="OpenAI Baselines: 0.2, which What Matters in On-Policy RL (arXiv 2006.05990) finds to do harm",
        too_high="no effect",
        too_low="the critic cannot follow the returns",
    )
    whiten_advantages: Literal["minibatch", "batch", "none"] = field(
        "minibatch",
        meaning="Over what the advantages are normalized to mean 0 and variance 1.",
        source="OpenAI Baselines: each minibatch",
    )
    gamma: float = field(
        0.99,
        ge=0,
        le=1,
        meaning="γ: discount per step.",
        source="PPO",
        too_high="the critic has to predict far ahead",
        too_low="the policy is short-sighted",
    )
    gae_lambda: float = field(
        0.95,
        ge=0,
        le=1,
        meaning="λ of GAE: 0 relies on the critic alone, 1 on the played return alone.",
        source="PPO",
        too_high="noisy advantages",
        too_low="advantages inherit the critic's errors",
    )
    trpo_kl: float = field(
        0.01,
        gt=0,
        meaning="δ: bound of the KL of a step with algorithm=trpo, nats.",
        source="TRPO",
        too_high="the linear model of the policy is wrong over such a step, and the line search refuses it",
        too_low="slow learning",
    )
    trpo_damping: float = field(
        0.1,
        ge=0,
        meaning="Added to the diagonal of the Fisher matrix with algorithm=trpo.",
        source="OpenAI Baselines",
        too_high="the step turns into a plain gradient step",
        too_low="directions about which the batch says nothing are followed far",
    )
    trpo_iterations: int = field(
        10,
        ge=1,
        meaning="Iterations of conjugate gradients with algorithm=trpo.",
        source="OpenAI Baselines; TRPO",
        too_high="slow",
        too_low="the step is a plain gradient step",
    )
