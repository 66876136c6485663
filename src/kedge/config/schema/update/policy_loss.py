"""`ppo`: the policy loss."""

from typing import Annotated, Literal

from annotated_types import Ge, Gt

from kedge.config.schema.field import Choice, field
from kedge.config.schema.section import OwnFunction, Parameters, Section

RatioOf = Literal["token", "sequence"]


class ImportanceWeights(Parameters):
    """The weights that make up for the difference between sampler and trainer."""

    cap: Annotated[float, Gt(0)] | Literal["auto"] | None = "auto"
    """Cap of the importance weights π_trainer/π_sampler that multiply each token's policy loss; null uses no weights.
    auto: none where the sampler is exact (builtin in fp32 without max_staleness), 2 elsewhere.

    Source: kedge: the old logprobs are the trainer's own, and with an exact sampler every weight is 1. Truncated
        importance sampling, 2, for the others
    Too high: a few tokens that the sampler found unlikely dominate the gradient
    Too low: the correction is cut off, and the gradient shrinks
    """


class Pretraining(Parameters):
    """The weight of the pretraining loss, and its batch."""

    coef: float = field(0.0, ge=0)
    """Weight of the loss, as the value alone.

    Source: kedge: off
    """
    batch: int = field(1, ge=1)
    """Texts of data.pretraining in each step, as a multiple of the minibatch's responses.

    Source: kedge: as many as responses; InstructGPT has 8 times as many
    Too high: steps take longer, mostly for pretraining
    Too low: the gradient of the pretraining loss is noisy
    """


class PolicyLoss(Section):
    """The policy's part of the loss."""

    policy_loss: (
        Choice[
            Literal[
                "clipped",
                "dual_clip",
                "unclipped",
                "kl_penalty_fixed",
                "kl_penalty_adaptive",
                "cispo",
                "double_sided",
            ],
            Literal["dual_clip", "kl_penalty_fixed", "kl_penalty_adaptive"],
            Annotated[float, Ge(0)],
        ]
        | OwnFunction
    ) = field("clipped")
    """Surrogate loss: clipped ratios; dual_clip: the same, with a bound on ratios of tokens with negative advantages,
    {dual_clip: 3}; plain ratios; or plain ratios with a KL penalty to the sampling policy, whose weight, at the start
    for the adaptive one, is 1 or {kl_penalty_fixed: 3}; cispo: log probabilities weighted by ratios of at most 1 +
    clip_range_high; double_sided: plain ratios without the tokens outside the clip range, on either side. Or a function
    of log ratios and advantages that returns a loss per token, `file.py:name`.

    Source: PPO eq. 7; clipping is the best in its table 1, and 1 the best weight of a penalty. dual_clip: 3 in
        dual-clip PPO. CISPO: MiniMax-M1; double_sided: SAO
    Text: a function
    """
    ratio: Literal["token", "sequence", "turn"] = "token"
    """The ratio in the surrogate: each token's own, or the geometric mean over the response (with
    ppo.aggregation=sequence: GSPO), which moves far less and needs a clip range of about 3e-4, or over each turn of the
    policy in an episode, which lies between the two.

    Source: PPO; sequence: GSPO; turn: ST-PPO
    """
    clip_range: float = field(0.2, gt=0, lt=1)
    """ε: how far a token's probability ratio may move from 1 before its gradient is cut.

    Source: PPO, S2, N+
    Too high: more aggressive updates, at the risk of instability
    Too low: most tokens are clipped and learning is slow
    """
    clip_range_high: float | None = field(None, gt=0)
    """ε for ratios above 1; null uses clip_range on both sides.

    Source: PPO clips both sides alike; DAPO and VAPO use 0.28. With policy_loss=cispo, ratios may reach 5 (ScaleRL)
    Too high: the probability of rare tokens with a lucky reward grows unchecked
    Too low: unlikely tokens can hardly become likely, and entropy falls
    """
    old_logprobs: Choice[Literal["trainer", "sampler"], Literal["trainer"], ImportanceWeights] = field("trainer")
    """Whose log probabilities are the denominator of the ratio, and the policy's in the KL to the reference: the
    trainer's, under the weights at the start of the update, or the sampler's, which differ with rollout.max_staleness
    and in bf16 and vLLM. With the sampler's, the clip also acts on stale tokens, and no importance weights are used;
    with the trainer's, {trainer: 2} caps them at 2.

    Source: trainer: decoupled PPO (AReaL), whose importance weights correct for the sampler. sampler: SAO
    """
    importance_mask: Choice[RatioOf, RatioOf, tuple[Annotated[float, Gt(0)], Annotated[float, Gt(0)]]] | None = field(
        None
    )
    """Tokens that get no policy loss because π_trainer/π_sampler is outside a band: of single tokens, 0.5 to 2, or of
    whole responses, whose geometric mean is to be 0.99 to 1.01; {token: [0.5, 5]} names another band. Null masks none.
    Tokens inside keep the weight of ppo.old_logprobs.

    Source: kedge: none, since truncation is enough where sampler and trainer hardly differ. token: IcePop, whose
        authors have 0.5 to 5; sequence: SkyRL's band, for a sampler with the same weights, not for stale responses
    Too high: a wide band: tokens that the sampler saw differently dominate the gradient
    Too low: a narrow band: most tokens are masked, and little is left to train on
    """
    aggregation: Literal["token", "sequence", "constant"] = "token"
    """How token losses are reduced: mean over all tokens, mean over responses of their token means, or sum divided by a
    constant length (rollout.max_new_tokens).

    Source: N+ and S3; Dr. GRPO for constant
    """
    entropy_coef: float = field(0.0, ge=0)
    """Weight of the entropy bonus, per nat of next-token entropy.

    Source: Ziegler, Stiennon, N+. S2 uses 0.01, which suits small action spaces; for a vocabulary 0.001 is a lot
    Too high: the policy stays random and the text turns into noise
    Too low: the policy becomes deterministic too fast and gets stuck
    """
    entropy_target: float | None = field(None, gt=0)
    """Mean entropy, in nats per token, toward which entropy_coef is adapted; null keeps entropy_coef fixed.

    Source: S4, where it is optional too
    Too high: the coefficient grows until the text is noise
    Too low: the coefficient falls to 0 and has no effect
    """
    positive_nll_coef: float = field(0.0, ge=0)
    """Weight of the negative log likelihood of the update's own good responses, mean over their tokens.

    Source: off in PPO; VAPO uses 0.1, for correct responses
    Too high: the policy imitates its first successes, and entropy falls
    Too low: no effect; rare successes are used for the policy gradient only
    """
    ptx_coef: Pretraining = Pretraining()
    """Weight of the cross-entropy on data.pretraining, added to each step; {coef: 27.8, batch: 8} has batches of
    another size.

    Source: kedge: off, since it needs data; InstructGPT uses 27.8
    Too high: the run turns into pretraining
    Too low: abilities outside the task are lost (the alignment tax)
    """
