"""The critic, and how its values become advantages."""

from typing import Literal

from kedge.config.schema.field import Section, knob

__all__ = ["PpoCritic"]


class PpoCritic(Section):
    """Value network, value loss, advantage estimate, and the shape of the rewards that both see."""

    critic: Literal["shared", "separate"] = knob(
        "shared",
        meaning="A value head on the policy's trunk, or a model of its own.",
        source="S0, S1, S4, Ziegler; S3, Stiennon and N+ take a separate one at twice the memory",
    )
    critic_init: Literal["auto", "reward", "policy"] = knob(
        "auto",
        meaning="What a separate critic starts from; auto is the reward model if there is just one, else the policy.",
        source="Stiennon, N+: the reward model",
    )
    value_head_init: Literal["zero", "normal"] = knob(
        "zero",
        meaning="A new value head's weights: 0, so that the first values are 0, or normal with std 1/√(d+1).",
        source="kedge: the first advantages are then the rewards; normal is N+'s scalar head",
    )
    value_coef: float = knob(
        0.1,
        ge=0,
        meaning="Weight of the value loss.",
        source="Ziegler, Stiennon, N+; S0 and S2 take 0.5, at which a shared trunk drifts for the critic's sake",
        too_high="a shared trunk serves prediction rather than the policy",
        too_low="the value function learns slowly, and the advantages are poor",
    )
    value_loss: Literal["half_mse", "mse"] = knob(
        "half_mse",
        meaning="Whether the squared error is halved before value_coef multiplies it.",
        source="S4, N+: halved; S0 and S2 not",
    )
    value_unit: Literal["returns_std", "score"] = knob(
        "returns_std",
        meaning="Unit of the value loss and of value_clip_range: the standard deviation of the batch's returns, or the "
        "score's own.",
        source="kedge: in the score's unit (all papers) large returns, such as a KL times a large β, let the value "
        "gradient drown the policy's on a shared trunk",
    )
    value_head_rate: float = knob(
        30.0,
        gt=0,
        meaning="Learning rate of a value head on the policy's trunk, as a multiple of ppo.learning_rate.",
        source="kedge: at the trunk's own rate a head that starts at 0 needs hundreds of steps to reach the returns",
        too_high="values jump, and the advantages with them",
        too_low="explained variance stays at 0 for most of the run",
    )
    value_clip_range: float | None = knob(
        0.2,
        gt=0,
        meaning="How far a value may move from its old one before its gradient stops, in ppo.value_unit; null never.",
        source="N+, S2's option",
        too_high="no effect, since values never move that far",
        too_low="values cannot follow returns that are large against it",
    )
    value_warmup_updates: int = knob(
        0,
        ge=0,
        meaning="First updates that train the critic alone, the policy frozen.",
        source="off in the papers of short responses; VC-PPO warms up for long ones",
        too_high="updates are spent on a policy that no longer needs it",
        too_low="the first policy steps follow an untrained critic",
    )
    advantage: Literal["gae", "monte_carlo", "td", "n_step", "to_go", "total"] = knob(
        "gae",
        meaning="Weight of a token's gradient: GAE, return − value, TD residual, n-step, or return (to go, total).",
        source="S0, S3, S4, N+; monte_carlo is S1's reward − V",
    )
    advantage_steps: int = knob(
        5,
        ge=1,
        meaning="Tokens before the value takes over, under advantage=n_step.",
        source="A3C takes 5",
        too_high="the variance of the plain return",
        too_low="the bias of the critic",
    )
    gamma: float = knob(
        1.0,
        ge=0,
        le=1,
        meaning="γ: discount per token.",
        source="Ziegler, Stiennon, InstructGPT, N+",
        too_high="1 is right for a response that ends",
        too_low="early tokens do not feel the score at the end",
    )
    gae_lambda: float = knob(
        0.95,
        ge=0,
        le=1,
        meaning="λ of GAE: 0 trusts the critic alone, 1 the sampled return alone.",
        source="GAE, Ziegler, Stiennon, N+",
        too_high="noisy advantages",
        too_low="advantages biased by the critic's errors, and early tokens of long responses unmoved",
    )
    whiten_advantages: bool = knob(
        True,
        meaning="Whether the batch's advantages are shifted and scaled to mean 0 and variance 1.",
        source="S0, S3, Ziegler, N+",
    )
    whiten_rewards: bool = knob(
        False,
        meaning="Whether the batch's token rewards are scaled to variance 1.",
        source="S3: optional; N+ off",
    )
    score_at: Literal["last", "after_last"] = knob(
        "last",
        meaning="The position that receives the score: a response's last token, or one further, as in N+'s code.",
        source="S0, S1, S2, S3",
    )
