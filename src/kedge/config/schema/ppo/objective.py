"""The policy's part of the PPO loss."""

from typing import Annotated, Literal

from annotated_types import Gt
from pydantic import model_validator

from kedge.config.schema.field import field
from kedge.config.schema.section import Group

__all__ = ["ObjectiveConfig"]


class ObjectiveConfig(Group):
    """Surrogate loss, entropy bonus, and pretraining mix."""

    policy_loss: Literal["clipped", "unclipped", "kl_penalty_fixed", "kl_penalty_adaptive", "cispo", "double_sided"] = (
        field(
            "clipped",
            meaning="Surrogate loss: clipped ratios, plain ratios, or plain ratios with a KL penalty to the sampling "
            "policy; cispo: log probabilities weighted by ratios of at most 1 + clip_range_high; double_sided: plain "
            "ratios without the tokens outside the clip range, on either side.",
            source="PPO eq. 7; clipping is the best in its table 1. CISPO: MiniMax-M1; double_sided: SAO",
        )
    )
    ratio: Literal["token", "sequence"] = field(
        "token",
        meaning="The ratio in the surrogate: each token's own, or the geometric mean over the response (with "
        "ppo.aggregation=sequence: GSPO), which moves far less and needs a clip range of about 3e-4.",
        source="PPO; sequence: GSPO",
    )
    clip_range: float = field(
        0.2,
        gt=0,
        lt=1,
        meaning="ε: how far a token's probability ratio may move from 1 before its gradient is cut.",
        source="PPO, S2, N+",
        too_high="more aggressive updates, at the risk of instability",
        too_low="most tokens are clipped and learning is slow",
    )
    clip_range_high: float | None = field(
        None,
        gt=0,
        meaning="ε for ratios above 1; null uses clip_range on both sides.",
        source="PPO clips both sides alike; DAPO and VAPO use 0.28. With policy_loss=cispo, ratios may reach 5 "
        "(ScaleRL)",
        too_high="the probability of rare tokens with a lucky reward grows unchecked",
        too_low="unlikely tokens can hardly become likely, and entropy falls",
    )
    dual_clip: float | None = field(
        None,
        gt=1,
        meaning="Largest ratio that counts for a token with a negative advantage; null sets no bound.",
        source="off in PPO; dual-clip PPO uses 3",
        too_high="no effect",
        too_low="bad tokens that have become likely are hardly pushed back",
    )
    old_logprobs: Literal["trainer", "sampler"] = field(
        "trainer",
        meaning="Whose log probabilities are the denominator of the ratio, and the policy's in the KL to the "
        "reference: the trainer's, under the weights at the start of the update, or the sampler's, under those that "
        "sampled. They differ with rollout.max_staleness and where the sampler is not exact (bf16, vLLM). With the "
        "sampler's, the clip also acts on stale tokens, and no importance weights are used.",
        source="trainer: decoupled PPO (AReaL), whose importance weights correct for the sampler. sampler: SAO",
    )
    importance_cap: Annotated[float, Gt(0)] | Literal["auto"] | None = field(
        "auto",
        meaning="Cap of the importance weights π_trainer/π_sampler that multiply each token's policy loss; null uses "
        "no weights. They correct for a sampler whose probabilities differ from the trainer's. auto: none where the "
        "sampler is exact (builtin in fp32) and with ppo.old_logprobs=sampler, 2 elsewhere.",
        source="kedge: the old logprobs are the trainer's own, and with an exact sampler every weight is 1. Truncated "
        "importance sampling, 2, for the others",
        too_high="a few tokens that the sampler found unlikely dominate the gradient",
        too_low="the correction is cut off, and the gradient shrinks",
    )
    surrogate_kl_coef: float = field(
        1.0,
        ge=0,
        meaning="Weight of the KL to the sampling policy, for policy_loss=kl_penalty_*; its start for the adaptive "
        "one.",
        source="PPO table 1: the best fixed value",
        too_high="the policy hardly moves",
        too_low="nothing limits the size of an update",
    )
    surrogate_kl_target: float = field(
        0.01,
        gt=0,
        meaning="Target of that KL in nats per token, for policy_loss=kl_penalty_adaptive.",
        source="PPO table 1: the best adaptive value",
        too_high="large, unstable updates",
        too_low="the policy hardly moves",
    )
    aggregation: Literal["token", "sequence", "constant"] = field(
        "token",
        meaning="How token losses are reduced: mean over all tokens, mean over responses of their token means, or sum "
        "divided by a constant length (rollout.max_new_tokens).",
        source="N+ and S3; Dr. GRPO for constant",
    )
    entropy_coef: float = field(
        0.0,
        ge=0,
        meaning="Weight of the entropy bonus, per nat of next-token entropy.",
        source="Ziegler, Stiennon, N+. S2 uses 0.01, which suits small action spaces; for a vocabulary 0.001 is a lot",
        too_high="the policy stays random and the text turns into noise",
        too_low="the policy becomes deterministic too fast and gets stuck",
    )
    entropy_target: float | None = field(
        None,
        gt=0,
        meaning="Mean entropy, in nats per token, toward which entropy_coef is adapted; null keeps entropy_coef fixed.",
        source="S4, where it is optional too",
        too_high="the coefficient grows until the text is noise",
        too_low="the coefficient falls to 0 and has no effect",
    )
    positive_nll_coef: float = field(
        0.0,
        ge=0,
        meaning="Weight of the negative log likelihood of the update's own good responses, mean over their tokens.",
        source="off in PPO; VAPO uses 0.1, for correct responses",
        too_high="the policy imitates whatever succeeded first, and entropy falls",
        too_low="no effect; rare successes are used for the policy gradient only",
    )
    positive_nll_min_score: float = field(
        1.0,
        meaning="Score from which a response counts as good for ppo.positive_nll_coef, token scores included.",
        source="kedge: verifiers score 1 for correct, and 0 or −1 otherwise (VC-PPO, DAPO: −1)",
        too_high="no response is imitated",
        too_low="poor responses are imitated, too",
    )
    ptx_coef: float = field(
        0.0,
        ge=0,
        meaning="Weight of the cross-entropy on data.pretraining, added to each step.",
        source="kedge: off, since it needs data; InstructGPT uses 27.8",
        too_high="the run turns into pretraining",
        too_low="abilities outside the task are lost (the alignment tax)",
    )
    ptx_batch_size: int | None = field(
        None,
        ge=1,
        meaning="Pretraining texts per optimizer step; null uses as many as the minibatch has responses.",
        source="kedge; InstructGPT uses eight times as many",
        too_high="slow",
        too_low="a noisy pretraining gradient, multiplied by ptx_coef",
    )

    @model_validator(mode="after")
    def _check_clips(self) -> "ObjectiveConfig":
        bounds = {
            "ppo.clip_range_high": (self.clip_range_high, ("clipped", "cispo", "double_sided")),
            "ppo.dual_clip": (self.dual_clip, ("clipped",)),
        }
        for name, (value, losses) in bounds.items():
            if value is not None and self.policy_loss not in losses:
                raise ValueError(
                    f"{name}={value} needs ppo.policy_loss={' or '.join(losses)}, but "
                    f"ppo.policy_loss={self.policy_loss}; change or remove one"
                )
        if self.old_logprobs == "sampler" and isinstance(self.importance_cap, float):
            raise ValueError(
                f"ppo.importance_cap={self.importance_cap:g} weighs tokens by π_trainer/π_sampler, which "
                "ppo.old_logprobs=sampler has in the ratio already; remove one"
            )
        return self
