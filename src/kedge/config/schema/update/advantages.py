"""`ppo`: advantages."""

from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt

from kedge.config.schema.field import Choice, field
from kedge.config.schema.section import OwnFunction, Section


class Advantages(Section):
    """Advantages, and groups of responses to the same prompt."""

    advantage: (
        Choice[Literal["gigpo"], Literal["gigpo"], Annotated[float, Ge(0)]]
        | Choice[Literal["spo"], Literal["spo"], Annotated[float, Gt(0), Lt(1)]]
        | Choice[
            Literal[
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
                "rloo_critic",
                "reinforce++_critic",
            ],
            Literal["n_step"],
            Annotated[int, Ge(1)],
        ]
        | OwnFunction
    ) = field("gae")
    """Weight of a token's gradient. With a critic: gae, return − value (monte_carlo), the TD residual (td), or n_step,
    where n tokens of reward precede the value: {n_step: 3}; n_step alone has 5, as A3C. Without: the return (to_go,
    total, reinforce++), or the score less a baseline: the mean of the prompt's other responses (rloo), of all of them
    (dr_grpo, reinforce++_baseline; grpo divides by their standard deviation), weighted by length (opo), the score of
    the greedy response (remax), or a running mean of the prompt's scores in earlier updates, which decays by ρ: {spo:
    ρ}; spo alone has 0.875; or that of grpo plus ω times that of a turn among those that started in the same state,
    where the policy had read the same since its last turn: {gigpo: ω}; gigpo alone has 1. Both: rloo or reinforce++
    less w times the critic's change of value since the response's start, with the w in [0, 1] that lowers the variance
    on other prompts, or 0 (rloo_critic, reinforce++_critic). Or a function (rewards, mask, values=, group=) →
    (advantages, returns), `file.py:name`.

    Source: S0, S3, S4, N+; monte_carlo is S1's reward − V; RLOO, GRPO, Dr. GRPO, REINFORCE++, OPO, ReMax, SPO, GiGPO
        (docs/family.md)
    Text: a function
    """
    credit: Literal["token", "turn"] = "token"
    """What is one action: a token, or a turn of the policy in an episode (without an environment, the whole response):
    its reward is the sum over its tokens, its value the one before the first of them, where alone the critic is
    trained, and all its tokens get its advantage. γ and λ are then per turn. gigpo is by turn regardless of this
    setting.

    Source: token: PPO on single responses; turn: Turn-PPO
    """
    gamma: float = field(1.0, ge=0, le=1)
    """γ: discount per token, or per turn with ppo.credit=turn.

    Source: Ziegler, Stiennon, InstructGPT, N+
    Too high: no harm: 1 is right for responses that end
    Too low: the score at the end hardly reaches early tokens
    """
    gae_lambda: (
        Annotated[float, Ge(0), Le(1)]
        | Choice[Literal["length_adaptive"], Literal["length_adaptive"], Annotated[float, Gt(0)]]
    ) = field(1.0)
    """λ of GAE: 0 relies on the critic alone, 1 on the sampled return alone; {length_adaptive: α}: 1 − 1/(α·l) for a
    response of l tokens, stop token included, or of l turns with ppo.credit=turn, but at least 0; length_adaptive alone
    has α = 0.05, which gives responses of up to 20 tokens λ = 0.

    Source: kedge, measured (bench/study/RESULTS.md): with a value head, 1 is better than 0.95 at equal tokens on three
        tasks of three, and level at equal FLOPs. Ziegler, Stiennon, N+: 0.95; VAPO: length_adaptive, for responses of
        thousands of tokens
    Too high: noisy advantages, beside a critic that explains much
    Too low: advantages inherit the critic's errors, and early tokens of long responses hardly learn
    """
    value_gae_lambda: float | None = field(None, ge=0, le=1)
    """λ of the critic's targets; null: that of the advantages. With 1 the targets are the sampled returns, without the
    critic's own values.

    Source: null in the papers on short responses; VC-PPO, VAPO: 1, which is unbiased
    Too high: targets as noisy as the returns
    Too low: the critic is fitted to its own values, and learns about early tokens of long responses slowly
    """
    whiten_advantages: Literal["auto"] | bool = "auto"
    """Whether the batch's advantages are normalized to mean 0 and variance 1; auto: not for rloo, grpo, dr_grpo, remax,
    opo, gigpo and rloo_critic, as in their papers.

    Source: S0, S3, Ziegler, N+; the papers of the estimators (docs/family.md)
    """
    whiten_rewards: bool = False
    """Scale the batch's token rewards to variance 1.

    Source: N+: off; optional in S3
    """
    score_at: Literal["last", "after_last"] = "last"
    """Position that receives the score: the response's last token, or one after it, as in N+'s code.

    Source: S0, S1, S2, S3
    """
    constant_groups: Choice[Literal["keep", "drop", "resample"], Literal["resample"], Annotated[int, Ge(1)]] = field(
        "keep"
    )
    """For prompts with equal scores for all responses (token scores are summed): keep them, drop them before training,
    or drop and resample: sample other prompts until rollout.num_prompts groups have spread, in at most 9 additional
    rounds, or {resample: 4} of them; the update is smaller if they do not fill it. Updates that train the critic alone
    keep them. reward/score_mean is of all responses, trained on or not.

    Source: kedge: keep, since a critic also learns from them. DAPO resamples; verl's recipe for it generates at most 10
        batches, and then stops with an error
    """
