"""How rewards and values become advantages."""

from typing import Annotated, Literal

from annotated_types import Ge, Le
from pydantic import model_validator

from kedge.config.schema.field import field
from kedge.config.schema.section import Group

__all__ = ["AdvantagesConfig"]

NEED_VALUES = ("gae", "monte_carlo", "td", "n_step")
"""The estimators that use a critic."""

NEED_GROUPS = ("rloo", "grpo", "dr_grpo", "reinforce++_baseline", "opo")
"""The estimators that compare the responses to a prompt."""

UNWHITENED = ("rloo", "grpo", "dr_grpo", "remax", "opo")
"""The estimators whose papers do not normalize the advantages over the batch."""


class AdvantagesConfig(Group):
    """Advantage estimator, discount, whitening, and the position of the score."""

    advantage: Literal[
        "gae",
        "monte_carlo",
        "td",
        "n_step",
        "to_go",
        "total",
        "rloo",
        "grpo",
        "dr_grpo",
        "reinforce++",
        "reinforce++_baseline",
        "remax",
        "opo",
    ] = field(
        "gae",
        meaning="Weight of a token's gradient. With a critic: GAE, return − value, TD residual, n-step. Without: the "
        "return (to_go, total, reinforce++), or the score less a baseline: the mean of the prompt's other responses "
        "(rloo), of all of them (dr_grpo, reinforce++_baseline; grpo divides by their standard deviation), weighted by "
        "length (opo), or the score of the greedy response (remax).",
        source="S0, S3, S4, N+; monte_carlo is S1's reward − V; RLOO, GRPO, Dr. GRPO, REINFORCE++, OPO, ReMax "
        "(docs/family.md)",
    )
    advantage_steps: int = field(
        5,
        ge=1,
        meaning="n of advantage=n_step: tokens of reward before the value takes over.",
        source="A3C uses 5",
        too_high="the variance of the plain return",
        too_low="the bias of the critic",
    )
    gamma: float = field(
        1.0,
        ge=0,
        le=1,
        meaning="γ: discount per token.",
        source="Ziegler, Stiennon, InstructGPT, N+",
        too_high="no harm: 1 is right for responses that end",
        too_low="the score at the end hardly reaches early tokens",
    )
    gae_lambda: Annotated[float, Ge(0), Le(1)] | Literal["length_adaptive"] = field(
        1.0,
        meaning="λ of GAE: 0 relies on the critic alone, 1 on the sampled return alone; length_adaptive: "
        "1 − 1/(α·l) for a response of l tokens, stop token included, but at least 0, with α = "
        "ppo.length_adaptive_alpha.",
        source="kedge, measured (docs/results.md): with a value head, 1 is better than 0.95 at equal tokens on three "
        "tasks of three, and level at equal FLOPs. Ziegler, Stiennon, N+: 0.95; VAPO: length_adaptive",
        too_high="noisy advantages, beside a critic that explains much",
        too_low="advantages inherit the critic's errors, and early tokens of long responses hardly learn",
    )
    length_adaptive_alpha: float = field(
        0.05,
        gt=0,
        meaning="α of gae_lambda=length_adaptive: the share of a response over which GAE looks ahead. Responses of up "
        "to 1/α tokens get λ = 0.",
        source="VAPO, for responses of thousands of tokens",
        too_high="λ is almost 1: noisy advantages",
        too_low="λ is 0 for most responses, and only their last tokens learn from the score itself",
    )
    value_gae_lambda: float | None = field(
        None,
        ge=0,
        le=1,
        meaning="λ of the critic's targets; null: that of the advantages. With 1 the targets are the sampled returns, "
        "without the critic's own values.",
        source="null in the papers on short responses; VC-PPO, VAPO: 1, which is unbiased",
        too_high="targets as noisy as the returns",
        too_low="the critic is fitted to its own values, and learns about early tokens of long responses slowly",
    )
    whiten_advantages: Literal["auto"] | bool = field(
        "auto",
        meaning="Whether the batch's advantages are normalized to mean 0 and variance 1; auto: not for "
        "rloo, grpo, dr_grpo, remax and opo, as in their papers.",
        source="S0, S3, Ziegler, N+; the papers of the estimators (docs/family.md)",
    )
    whiten_rewards: bool = field(
        False,
        meaning="Whether the batch's token rewards are scaled to variance 1.",
        source="N+: off; optional in S3",
    )
    score_at: Literal["last", "after_last"] = field(
        "last",
        meaning="Position that receives the score: the response's last token, or one after it, as in N+'s code.",
        source="S0, S1, S2, S3",
    )

    @property
    def needs_values(self) -> bool:
        """Whether the estimator uses a critic."""
        return self.advantage in NEED_VALUES

    @property
    def needs_groups(self) -> bool:
        """Whether the estimator compares the responses to a prompt."""
        return self.advantage in NEED_GROUPS

    @property
    def whitens_advantages(self) -> bool:
        """`whiten_advantages`, with `auto` resolved."""
        if self.whiten_advantages == "auto":
            return self.advantage not in UNWHITENED
        return self.whiten_advantages

    @model_validator(mode="after")
    def _check_lambdas(self) -> "AdvantagesConfig":
        if self.gae_lambda == "length_adaptive" and self.advantage != "gae":
            raise ValueError(f"ppo.gae_lambda=length_adaptive needs ppo.advantage=gae; it is {self.advantage}")
        if self.value_gae_lambda is not None and not self.needs_values:
            raise ValueError(
                f"ppo.value_gae_lambda has no effect with ppo.advantage={self.advantage}, whose returns contain no "
                "values; remove it"
            )
        return self

    @model_validator(mode="after")
    def _check_rewards(self) -> "AdvantagesConfig":
        if self.whiten_rewards and self.needs_groups:
            raise ValueError(
                f"ppo.whiten_rewards=true rescales the rewards that ppo.advantage={self.advantage} compares within "
                "groups; use false"
            )
        if self.advantage == "remax" and (self.whiten_rewards or self.gamma < 1):
            setting = "whiten_rewards=true" if self.whiten_rewards else f"gamma={self.gamma:g}"
            raise ValueError(
                f"ppo.{setting} scales the rewards, but not the greedy response's score, which ppo.advantage=remax "
                "subtracts; use ppo.whiten_rewards=false and ppo.gamma=1"
            )
        return self
