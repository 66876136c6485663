"""`ppo`: the PPO update."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

from annotated_types import Ge, Gt, Le
from pydantic import StringConstraints, model_validator

from kedge.config.schema.choice import Choice
from kedge.config.schema.field import field
from kedge.config.schema.optimizer import Schedule, TrainedSection, schedule_field
from kedge.config.schema.section import check

NEED_VALUES = ("gae", "monte_carlo", "td", "n_step")
"""The estimators that use a critic."""

NEED_GROUPS = ("rloo", "grpo", "dr_grpo", "reinforce++_baseline", "opo")
"""The estimators that compare the responses to a prompt."""

UNWHITENED = ("rloo", "grpo", "dr_grpo", "remax", "opo")
"""The estimators published without normalization of the advantages over the batch."""

Reaction = Literal["stop", "skip", "rollback"]
Place = Literal["reward", "score", "loss"]
RatioOf = Literal["token", "sequence"]
OwnFunction = Annotated[str, StringConstraints(pattern=r":[A-Za-z_][\w.]*$")]
"""The name of a user's function, `file.py:name` or `module:name`."""


class PpoConfig(TrainedSection):
    """The PPO update: loop, policy loss, KL to the reference, critic, advantages, groups, guard, evaluation."""

    # The loop: updates, epochs, minibatches, and the learning rate.
    num_updates: int = field(
        200,
        ge=0,
        meaning="Updates in the run; each one samples new responses.",
        source="kedge: S3 reports over-optimization within a few hundred",
        too_high="the reward model is over-optimized: the score rises while the text gets worse",
        too_low="the score is still rising at the end",
    )
    learning_rate: float = field(
        1e-5,
        ge=0,
        meaning="Peak learning rate of Adam.",
        source="S2 and Ziegler; N+ uses 3e-6 from 1B up, models of a few million parameters use 1e-4 "
        "(bench/defaults/RESULTS.md)",
        too_high="training is unstable: KL and clip fraction shoot up and the text collapses",
        too_low="slow convergence: clip fraction and KL stay near 0 and the score is flat",
    )
    schedule: Schedule = schedule_field(
        "linear",
        source="Ziegler and N+; InstructGPT has a rise",
        over="the policy's updates, which follow ppo.value_warmup_updates",
        further=" A critic that is trained first starts with a rise of the same length.",
    )
    num_epochs: int = field(
        4,
        ge=1,
        meaning="Passes over the responses of each update.",
        source="S2, Ziegler, Stiennon, N+",
        too_high="the batch is overfitted: in later epochs most tokens are clipped",
        too_low="expensive samples are under-used, so more of them are needed",
    )
    num_minibatches: int = field(
        1,
        ge=1,
        meaning="Optimizer steps per epoch, each on an equal share of the update's responses.",
        source="Ziegler and N+; InstructGPT uses 8. Fewer, larger steps add less noise to the KL",
        too_high="many small, noisy steps away from the policy that sampled",
        too_low="few steps per update",
    )
    early_stop_kl: float | None = field(
        None,
        gt=0,
        meaning="KL to the sampling policy, in nats per token; the policy's steps of an update end at 1.5 times this "
        "value, and the rest of them train only the critic's own parameters. Null disables it.",
        source="off in the papers on language models; 0.01 is common elsewhere. The critic continues as in Spinning Up",
        too_high="updates that go too far are not stopped",
        too_low="every update stops in its first epoch",
    )

    # The policy's part of the loss.
    policy_loss: (
        Literal["clipped", "unclipped", "kl_penalty_fixed", "kl_penalty_adaptive", "cispo", "double_sided"]
        | OwnFunction
    ) = field(
        "clipped",
        meaning="Surrogate loss: clipped ratios, plain ratios, or plain ratios with a KL penalty to the sampling "
        "policy; cispo: log probabilities weighted by ratios of at most 1 + clip_range_high; double_sided: plain "
        "ratios without the tokens outside the clip range, on either side. Or a function of log ratios and advantages "
        "that returns a loss per token, `file.py:name`.",
        source="PPO eq. 7; clipping is the best in its table 1. CISPO: MiniMax-M1; double_sided: SAO",
        text="a function",
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
        "reference: the trainer's, under the weights at the start of the update, or the sampler's, which "
        "differ with rollout.max_staleness and in bf16 and vLLM. With the sampler's, the clip also acts on "
        "stale tokens, and no importance weights are used.",
        source="trainer: decoupled PPO (AReaL), whose importance weights correct for the sampler. sampler: SAO",
    )
    importance_cap: Annotated[float, Gt(0)] | Literal["auto"] | None = field(
        "auto",
        meaning="Cap of the importance weights π_trainer/π_sampler that multiply each token's policy loss; null uses "
        "no weights. auto: none where the sampler is exact (builtin in fp32) and with "
        "ppo.old_logprobs=sampler, 2 elsewhere.",
        source="kedge: the old logprobs are the trainer's own, and with an exact sampler every weight is 1. Truncated "
        "importance sampling, 2, for the others",
        too_high="a few tokens that the sampler found unlikely dominate the gradient",
        too_low="the correction is cut off, and the gradient shrinks",
    )
    importance_mask: Choice[RatioOf, RatioOf, tuple[Annotated[float, Gt(0)], Annotated[float, Gt(0)]]] | None = field(
        None,
        meaning="Tokens that get no policy loss because π_trainer/π_sampler is outside a band: of single tokens, 0.5 "
        "to 2, or of whole responses, whose geometric mean is to be 0.99 to 1.01; {token: [0.5, 5]} names another "
        "band. Null masks none. Tokens inside keep the weight of ppo.importance_cap.",
        source="kedge: none, since truncation is enough where sampler and trainer hardly differ. token: IcePop, whose "
        "authors have 0.5 to 5; sequence: SkyRL's band, for a sampler with the same weights, not for stale responses",
        too_high="a wide band: tokens that the sampler saw differently dominate the gradient",
        too_low="a narrow band: most tokens are masked, and little is left to train on",
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
        too_high="the policy imitates its first successes, and entropy falls",
        too_low="no effect; rare successes are used for the policy gradient only",
    )
    ptx_coef: float = field(
        0.0,
        ge=0,
        meaning="Weight of the cross-entropy on data.pretraining, added to each step.",
        source="kedge: off, since it needs data; InstructGPT uses 27.8",
        too_high="the run turns into pretraining",
        too_low="abilities outside the task are lost (the alignment tax)",
    )

    ptx_batch: int = field(
        1,
        ge=1,
        meaning="Texts of data.pretraining in each step, as a multiple of the minibatch's responses.",
        source="kedge: as many as responses; InstructGPT has 8 times as many",
        too_high="steps take longer, mostly for pretraining",
        too_low="the gradient of the pretraining loss is noisy",
    )

    # The KL penalty to the reference policy, and the controller of its weight.
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
        meaning="Measure the KL to the reference even if it is not penalized (ppo.kl_coef=0).",
        source="kedge: if off and ppo.kl_coef=0, no reference model is loaded",
    )
    reference: str | None = field(
        None,
        meaning="The reference, such as a teacher (`--teacher`): a model with the policy's vocabulary. Null: the "
        "policy that the run starts from. With one, a run needs no reward: it can learn from the KL alone, as with "
        "the preset distill.",
        source="null: Ziegler, S4, InstructGPT, N+. A teacher: MiniLLM, GKD, On-Policy Distillation",
        text="a folder, a hub id or a run",
    )
    kl_in: Choice[Place, Place, Literal["k1", "k2", "k3"]] = field(
        "reward",
        meaning="Place of the KL: each token's in its own reward, a response's sum in its score, or each token's in "
        "the loss. It is estimated by k1 in the reward and in the score, and by k2 in the loss; {loss: k3} "
        "names another estimator: k1 is unbiased, k2 has low variance, k3 has both and is never negative. "
        "ppo.advantage=grpo needs loss: it would divide the KL by the standard deviation in the group.",
        source="Ziegler, S4, InstructGPT, N+: k1 in the reward; S1 for score; S3 and GRPO put it in the loss, where k2 "
        "has the right gradient, and k1's is 0 on average",
    )
    kl_controller: Choice[Literal["fixed", "ziegler", "schulman"], Literal["ziegler"], Annotated[int, Gt(0)]] = field(
        "fixed",
        meaning="β is fixed, or adapted by Ziegler's proportional controller or by the PPO paper's halving and "
        "doubling. Ziegler's has a horizon, the responses over which β may change by a factor of about 1.2: "
        "{ziegler: 10000}; ziegler alone is 1/30 of the policy's updates, at most 10,000 responses.",
        source="Stiennon, InstructGPT, N+; Ziegler's horizon is 10,000, for a run of two million responses",
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
    # The critic and its loss.
    critic: Literal["auto", "shared", "separate", "none"] = field(
        "auto",
        meaning="A value head on the policy's trunk (shared), a separate model, or none. Auto: none where "
        "ppo.advantage needs no values, else shared. One that ppo.advantage does not need is trained but not used.",
        source="shared: S0, S1, S4, Ziegler; it costs nothing, and explains nothing in short runs. S3, Stiennon and "
        "N+ use a separate one, which learns, at twice the memory and training time (bench/defaults/RESULTS.md). RLOO "
        "and GRPO have no critic",
    )
    critic_init: Literal["auto", "reward", "policy"] | str = field(
        "auto",
        meaning="Initial weights of the critic. Separate: a copy of the reward model or of the policy; auto is the "
        "reward model if there is exactly one (those of weight 0 aside), a decoder with the policy's tokens, else the "
        "policy. Or a trained critic: a folder, a hub id or a run, such as that of `kedge critic`; "
        "ppo.critic=auto is then of its kind.",
        source="Stiennon, N+: the reward model, whose outputs before the last token mean nothing at first: warm it up "
        "(bench/defaults/RESULTS.md); VC-PPO and VAPO: a critic trained before PPO",
        text="a folder, a hub id or a run",
    )
    freeze_critic: Literal["none", "attention"] = field(
        "none",
        meaning="Layers of a separate critic that PPO leaves as they are: none, or attention, with any adapter in it. "
        "They take no gradients and no optimizer state. `kedge critic` trains all layers.",
        source="none: N+ and VAPO train the whole critic. attention: SAO",
    )
    value_coef: float = field(
        0.1,
        ge=0,
        meaning="Weight of the value loss.",
        source="Ziegler, Stiennon, N+; S0 and S2 use 0.5, where value gradients dominate a shared trunk",
        too_high="a shared trunk serves value prediction rather than the policy",
        too_low="the value function learns slowly, and the advantages are poor",
    )
    value_loss: Choice[Literal["half_mse", "mse", "hl_gauss"], Literal["hl_gauss"], tuple[float, float, int]] = field(
        "half_mse",
        meaning="The critic's loss: half the squared error, the squared error, or the cross-entropy of a histogram of "
        "the return (HL-Gauss), which has no unit and no clip. {hl_gauss: [-10, 10, 101]}, which is hl_gauss "
        "alone, names the histogram's ends, in units of the return (the score minus the KL penalty), and "
        "number of bins; returns beyond the ends are moved to them.",
        source="S4 and N+ halve the squared error, S0 and S2 do not; hl_gauss: Farebrother et al., on Atari with C51's "
        "−10 to 10; kedge: twice C51's 51 bins, for scores with a standard deviation of 1",
        too_high="too wide a histogram: bins that are never used, and returns closer than a bin are told apart badly",
        too_low="too narrow a histogram: returns beyond the ends cannot be predicted",
    )
    value_unit: Literal["returns_std", "score"] = field(
        "returns_std",
        meaning="Unit in which the critic learns: of the value loss, value_clip_range, and the steps of its output "
        "layer. The standard deviation of the batch's returns, but at least a tenth of the critic's RMS "
        "error, so that learning does not depend on the scale of the reward; or the unit of the score. Unused "
        "with value_loss=hl_gauss.",
        source="kedge: in the unit of the score (all papers), large returns are out of reach of Adam's steps, and on a "
        "shared trunk their gradient swamps the policy's; PopArt (van Hasselt et al. 2016) adapts the output layer",
    )
    critic_learning_rate: float | None = field(
        None,
        ge=0,
        meaning="Peak learning rate of a separate critic, scheduled as the policy's; null: ppo.learning_rate.",
        source="null: N+ and Ziegler have one rate. Of those with two, VAPO's critic has twice the policy's, those of "
        "Open-Reasoner-Zero and SAO five times (5e-6 and 1e-6). kedge, measured (bench/defaults/RESULTS.md): "
        "the rate that "
        "trained the reward model, about seven times the policy's, explains twice as much in a short run",
        too_high="the values jump from update to update, and the advantages with them",
        too_low="the critic lags behind the policy, and explained variance stays low",
    )
    value_head_rate: float = field(
        10.0,
        gt=0,
        meaning="Learning rate of a value head on a trunk that starts as the policy's, shared or separate, as a "
        "multiple of ppo.learning_rate, or of ppo.critic_learning_rate.",
        source="kedge, measured (bench/defaults/RESULTS.md): at 1 to 3 a head that starts at 0 may not have "
        "reached the returns "
        "after ten updates; at 30 the first steps overshoot",
        too_high="the values jump, and the advantages with them",
        too_low="explained variance stays at 0 for most of the run",
    )
    value_clip_range: float | None = field(
        1.0,
        gt=0,
        meaning="How far a value may move in an update before its gradient is cut, in ppo.value_unit; null disables "
        "it, and is the default with value_loss=hl_gauss, which has no clip.",
        source="kedge: with 0.2 standard deviations per update the critic never reaches scores far from 0, without a "
        "limit a shared head overshoots them. Ziegler and N+ have 0.2, in units of the score; S2 has no limit",
        too_high="no effect, or values that overshoot the returns",
        too_low="the values cannot follow large returns",
    )
    num_critic_epochs: int = field(
        1,
        ge=1,
        meaning="Passes of the critic over the responses for each pass of the policy. The first is the policy's own; "
        "the others train only the parameters that are the critic's alone: a separate critic, or a shared value head.",
        source="1 in the papers on short responses; SAO: 2. Open-Reasoner-Zero takes 12 steps of the critic for each "
        "one of the policy, but within one pass",
        too_high="the critic is overfitted to the batch: value/loss falls while value/explained_variance, on new "
        "responses, does not rise",
        too_low="the critic lags behind the policy, and explained variance stays low",
    )
    value_gradient: Literal["trunk", "head"] = field(
        "trunk",
        meaning="Where the value loss's gradient ends: it trains the trunk that a shared value head reads, or the head "
        "alone, so that value prediction never changes the policy.",
        source="trunk: S0, S1, S4, Ziegler",
    )
    value_warmup_updates: int = field(
        0,
        ge=0,
        meaning="First updates that train only the critic, at the peak learning rate, with the policy frozen. The "
        "learning-rate schedule and the controllers of the coefficients start after them.",
        source="off in the papers on short responses; VC-PPO pretrains the critic for long ones, VAPO for 50 steps",
        too_high="updates are spent without training the policy",
        too_low="the first policy steps follow an untrained critic",
    )
    value_warmup_until: float | None = field(
        None,
        gt=0,
        lt=1,
        meaning="Explained variance that ends the warm-up: after the first update whose responses, to which the critic "
        "is not yet fitted, it explains at least so well. ppo.value_warmup_updates is then the most. Null: the warm-up "
        "has that length.",
        source="kedge: null; VC-PPO and VAPO warm up until value loss and explained variance are good enough. With "
        "ppo.value_gae_lambda below 1 the returns contain the critic's own values, which raises the figure",
        too_high="the warm-up always takes ppo.value_warmup_updates",
        too_low="one lucky batch ends it, and the first policy steps follow a critic that is hardly trained",
    )

    # Advantages.
    advantage: (
        Choice[
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
            ],
            Literal["n_step"],
            Annotated[int, Ge(1)],
        ]
        | OwnFunction
    ) = field(
        "gae",
        meaning="Weight of a token's gradient. With a critic: GAE, return − value, TD residual, or n-step, where n "
        "tokens of reward precede the value: {n_step: 3}; n_step alone has 5, as A3C. Without: the return (to_go, "
        "total, reinforce++), or the score less a baseline: the mean of the prompt's other responses (rloo), of all of "
        "them (dr_grpo, reinforce++_baseline; grpo divides by their standard deviation), weighted by length (opo), or "
        "the score of the greedy response (remax). Or a function (rewards, mask, values=, group=) → (advantages, "
        "returns), `file.py:name`.",
        source="S0, S3, S4, N+; monte_carlo is S1's reward − V; RLOO, GRPO, Dr. GRPO, REINFORCE++, OPO, ReMax "
        "(docs/family.md)",
        text="a function",
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
    gae_lambda: (
        Annotated[float, Ge(0), Le(1)]
        | Choice[Literal["length_adaptive"], Literal["length_adaptive"], Annotated[float, Gt(0)]]
    ) = field(
        1.0,
        meaning="λ of GAE: 0 relies on the critic alone, 1 on the sampled return alone; {length_adaptive: α}: "
        "1 − 1/(α·l) for a response of l tokens, stop token included, but at least 0; length_adaptive alone has "
        "α = 0.05, which gives responses of up to 20 tokens λ = 0.",
        source="kedge, measured (bench/study/RESULTS.md): with a value head, 1 is better than 0.95 at equal "
        "tokens on three "
        "tasks of three, and level at equal FLOPs. Ziegler, Stiennon, N+: 0.95; VAPO: length_adaptive, for responses "
        "of thousands of tokens",
        too_high="noisy advantages, beside a critic that explains much",
        too_low="advantages inherit the critic's errors, and early tokens of long responses hardly learn",
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
        meaning="Scale the batch's token rewards to variance 1.",
        source="N+: off; optional in S3",
    )
    score_at: Literal["last", "after_last"] = field(
        "last",
        meaning="Position that receives the score: the response's last token, or one after it, as in N+'s code.",
        source="S0, S1, S2, S3",
    )

    # The responses to the same prompt.
    constant_groups: Choice[Literal["keep", "drop", "resample"], Literal["resample"], Annotated[int, Ge(1)]] = field(
        "keep",
        meaning="For prompts with equal scores for all responses (token scores are summed): keep them, drop them "
        "before training, or drop and resample: sample other prompts until rollout.num_prompts groups have "
        "spread, in at most 9 additional rounds, or {resample: 4} of them; the update is smaller if they do "
        "not fill it. Updates that train the critic alone keep them. reward/score_mean is of all responses, "
        "trained on or not.",
        source="kedge: keep, since a critic also learns from them. DAPO resamples; verl's recipe for it generates at "
        "most 10 batches, and then stops with an error",
    )

    # Non-finite values and spikes.
    on_nonfinite: Reaction = field(
        "stop",
        meaning="On a NaN or infinite score, logprob, value, loss or gradient: stop the run; skip the rest of the "
        "update; or rollback, which also restores the weights of the newest checkpoint.",
        source="kedge: a fault should be seen",
    )
    on_spike: Choice[Reaction, Reaction, Annotated[float, Gt(0)]] | None = field(
        None,
        meaning="The same for a spike of the gradient norm or the loss: {skip: 6} is 6 standard deviations above the "
        "run's recent median, and skip alone is 8; null for none. The gradient norm is compared on a log scale, the "
        "loss on a linear one.",
        source="kedge: off, as in the papers, which clip the gradient. No healthy run reaches 8. PaLM rolled back, by "
        "hand",
    )
    max_skips: int = field(
        3,
        ge=0,
        meaning="Updates in a row that may be skipped or rolled back; one more ends the run.",
        source="kedge: four in a row are not an accident",
        too_high="a broken run continues for hours without learning",
        too_low="two bad batches in a row end the run",
    )

    # Evaluation on held-out prompts, checks of the critic, and early ends.
    eval_every: int | None = field(
        None,
        ge=1,
        meaning="Updates between two evaluations on held-out prompts (data.eval_prompts, or a part of data.prompts), "
        "at the start and at the end as well: score, KL, length, and the win rate against the start's "
        "responses if evaluate.judge names a judge. Null: none. It changes nothing that is trained, except "
        "that held-out prompts are not trained on.",
        source="kedge: off, because it takes prompts away from training. A tenth of ppo.num_updates costs about 1 % of "
        "a run of the default size",
        too_high="the best policy lies between two evaluations",
        too_low="sampling and scoring the held-out prompts takes a noticeable part of the run",
    )
    eval_num_prompts: int = field(
        64,
        ge=1,
        meaning="Held-out prompts per evaluation, at most; without data.eval_prompts also at most data.eval_fraction "
        "of data.prompts. Each gets one response, always with the same random numbers.",
        source="kedge: a mean over 64 responses has an eighth of their standard deviation",
        too_high="evaluations are slow",
        too_low="the figures are mostly noise, and so is the choice of the best checkpoint",
    )
    eval_patience: int | None = field(
        None,
        ge=1,
        meaning="Evaluations without a new best value of the metric in checkpoint.keep_best after which the run ends; "
        "those of the critic's warm-up are not counted. null: it does not end early.",
        source="kedge: off; 3 is common in supervised training",
        too_high="the run continues although it only over-optimizes the reward",
        too_low="noise ends the run before the policy has improved",
    )
    max_kl: float | None = field(
        None,
        gt=0,
        meaning="KL to the reference, in nats per response, above which the run ends after the update; null: no bound.",
        source="kedge: off; Gao and Stiennon see the gold score fall from about 10 nats on",
        too_high="a policy far from the reference is trained on",
        too_low="the run ends before the score has risen",
    )
    critic_check: int | None = field(
        None,
        ge=1,
        meaning="Updates between two checks of the critic, at the start and at the end as well: responses to held-out "
        "prompts, as in ppo.eval_every, are cut at random places, each prefix is continued several times, and "
        "the critic's value of the prefix is compared with the mean return of the continuations. Null: none.",
        source="VinePPO (arXiv 2410.01679), section 7; kedge: off, because a check samples several times as many "
        "responses as an update of the default size",
        too_high="a critic that has gone wrong is noticed late",
        too_low="the checks take longer than the training",
    )
    critic_check_size: list[Annotated[int, Ge(1)]] = field(
        [32, 4, 8],
        meaning="Size of a check of the critic: held-out prompts, at most; prefixes per prompt, each of another "
        "response, cut at a uniformly random token; and continuations per prefix, which are also the further "
        "responses per prompt that make the baseline. The same prompts each time, with the same random "
        "numbers.",
        source="kedge: intervals resample prompts; 32 give about ±0.06 for the share of ordered pairs across prompts, "
        "and 4 prefixes six pairs within a prompt. VinePPO estimates values with 9 continuations and the truth with "
        "256",
        too_high="checks are slow",
        too_low="few prompts: the intervals are too wide to tell a critic from chance; few continuations: even a "
        "perfect critic orders few pairs right",
    )

    @property
    def importance_band(self) -> tuple[RatioOf, float, float] | None:
        """Kind of ratio of `importance_mask` and the ends of its band; None for no mask."""
        if self.importance_mask is None:
            return None
        of = self.importance_mask.name
        return of, *(self.importance_mask.parameter or {"token": (0.5, 2.0), "sequence": (0.99, 1.01)}[of])

    @property
    def max_resamples(self) -> int:
        """Additional rounds of sampling with `constant_groups=resample`."""
        return self.constant_groups.parameter or 9

    @property
    def kl_estimator(self) -> Literal["k1", "k2", "k3"]:
        """The estimator of the KL: without one in `kl_in`, unbiased in the reward, the right gradient in the loss."""
        return self.kl_in.parameter or ("k2" if self.kl_in.name == "loss" else "k1")

    @property
    def value_bins(self) -> tuple[float, float, int] | None:
        """Lower end, upper end, and number of bins of `value_loss=hl_gauss`; None for another loss."""
        return (self.value_loss.parameter or (-10.0, 10.0, 101)) if self.value_loss.name == "hl_gauss" else None

    @property
    def estimator(self) -> str:
        """The estimator of the advantages, or the name of the user's function."""
        return str(self.advantage)

    @property
    def spike_sigma(self) -> float | None:
        """Standard deviations above the recent median that count as a spike; None without `on_spike`."""
        return None if self.on_spike is None else self.on_spike.parameter or 8.0

    @property
    def needs_reference(self) -> bool:
        """True if a reference model is needed: its KL is penalized or measured."""
        return self.kl_coef > 0 or self.measure_kl

    @property
    def charges_kl(self) -> bool:
        """True if the rewards contain the KL to the reference."""
        return self.kl_coef > 0 and self.kl_in.name != "loss"

    @property
    def names_critic(self) -> bool:
        """True if `critic_init` is the name of a trained critic."""
        return self.critic_init not in ("auto", "reward", "policy")

    @property
    def value_weight(self) -> float:
        """The weight of the value loss, which has halved squares: value_coef, or twice that for value_loss=mse."""
        return self.value_coef * (2.0 if self.value_loss.name == "mse" else 1.0)

    @property
    def needs_values(self) -> bool:
        """True if the estimator uses a critic."""
        return self.estimator in NEED_VALUES

    @property
    def needs_groups(self) -> bool:
        """True if the estimator compares the responses to a prompt."""
        return self.estimator in NEED_GROUPS

    @property
    def whitens_advantages(self) -> bool:
        """`whiten_advantages`, with `auto` resolved."""
        if self.whiten_advantages == "auto":
            return self.estimator not in UNWHITENED
        return self.whiten_advantages

    @property
    def holds_out(self) -> bool:
        """True if anything is measured on held-out prompts."""
        return self.eval_every is not None or self.critic_check is not None

    @property
    def num_held_out(self) -> int:
        """Held-out prompts that are used, at most."""
        evaluated = 0 if self.eval_every is None else self.eval_num_prompts
        return max(evaluated, 0 if self.critic_check is None else self.critic_check_size[0])

    @property
    def num_policy_updates(self) -> int:
        """Updates that train the policy, at least: those after the critic's warm-up."""
        return self.num_updates - self.value_warmup_updates

    @property
    def resolved_critic(self) -> Literal["shared", "separate", "none"]:
        """The kind of critic, `auto` resolved."""
        if self.critic != "auto":
            return self.critic
        return "shared" if self.needs_values or ":" in self.estimator else "none"

    @check
    def _check_clips(self) -> None:
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
        if self.importance_band is not None and not self.importance_band[1] < 1 < self.importance_band[2]:
            of, low, high = self.importance_band
            raise ValueError(
                f"ppo.importance_mask={{{of}: [{low:g}, {high:g}]}} must name the ends of a band around 1, such as "
                "[0.5, 2]: at 1, sampler and trainer agree"
            )

    @check
    def _check_kl(self) -> None:
        if self.kl_controller.name != "fixed" and self.kl_coef == 0:
            raise ValueError(
                f"ppo.kl_controller={self.kl_controller} scales ppo.kl_coef, which is 0; start from e.g. 0.05"
            )
        if self.kl_in == Choice("loss", "k1"):
            raise ValueError("ppo.kl_in={loss: k1} has no gradient on average; use k2 or k3")

    @model_validator(mode="before")
    @classmethod
    def _leave_out_the_clip(cls, values: Any) -> Any:
        """Drop the default of `value_clip_range` for a cross-entropy loss; the default is for squared errors."""
        if not isinstance(values, Mapping):
            return values
        settings = cast("Mapping[str, Any]", values)
        value_loss = settings.get("value_loss")
        is_histogram = "hl_gauss" in value_loss if isinstance(value_loss, dict) else value_loss == "hl_gauss"
        return {"value_clip_range": None, **settings} if is_histogram else settings

    @check
    def _check_histogram(self) -> None:
        if self.value_bins is None:
            return
        if self.value_clip_range is not None:
            raise ValueError("ppo.value_loss=hl_gauss has no value clip; set ppo.value_clip_range=null")
        low, high, number = self.value_bins
        if low >= high or number < 2:
            raise ValueError(
                f"ppo.value_loss={{hl_gauss: {[low, high, number]}}} must name the lower end, the upper end and the "
                "number of bins, such as [-10, 10, 101]"
            )

    @check
    def _check_init(self) -> None:
        if self.critic in ("auto", "shared") and self.critic_init == "reward":
            raise ValueError("ppo.critic_init=reward needs ppo.critic=separate")

    @check
    def _check_lambdas(self) -> None:
        if isinstance(self.gae_lambda, Choice) and self.estimator != "gae":
            raise ValueError(f"ppo.gae_lambda=length_adaptive needs ppo.advantage=gae; it is {self.estimator}")
        if self.value_gae_lambda is not None and not self.needs_values:
            raise ValueError(
                f"ppo.value_gae_lambda has no effect with ppo.advantage={self.estimator}, whose returns contain no "
                "values; remove it"
            )

    @check
    def _check_rewards(self) -> None:
        if self.whiten_rewards and self.needs_groups:
            raise ValueError(
                f"ppo.whiten_rewards=true rescales the rewards that ppo.advantage={self.estimator} compares within "
                "groups; use false"
            )
        if self.estimator == "remax" and (self.whiten_rewards or self.gamma < 1):
            setting = "whiten_rewards=true" if self.whiten_rewards else f"gamma={self.gamma:g}"
            raise ValueError(
                f"ppo.{setting} scales the rewards, but not the greedy response's score, which ppo.advantage=remax "
                "subtracts; use ppo.whiten_rewards=false and ppo.gamma=1"
            )

    @check
    def _check_critic(self) -> None:
        critic = self.resolved_critic
        advantage, warmup = self.estimator, self.value_warmup_updates
        if critic == "none" and self.needs_values:
            raise ValueError(
                f"ppo.advantage={advantage} needs a critic's values, but ppo.critic=none; use ppo.critic=shared, or an "
                "advantage without a critic, e.g. ppo.advantage=to_go"
            )
        if critic == "none" and warmup:
            raise ValueError(
                f"ppo.value_warmup_updates={warmup} warms up a critic, and ppo.advantage={advantage} has none; use 0"
            )
        if self.num_critic_epochs > 1 and critic == "none":
            raise ValueError(
                f"ppo.num_critic_epochs={self.num_critic_epochs} trains a critic, and ppo.advantage={advantage} "
                "has none; use 1"
            )
        if self.value_gradient == "head" and critic != "shared":
            raise ValueError(
                f"ppo.value_gradient=head needs ppo.critic=shared; here no trunk is shared (ppo.critic={critic})"
            )
        if self.freeze_critic != "none" and critic != "separate":
            raise ValueError(
                f"ppo.freeze_critic={self.freeze_critic} needs ppo.critic=separate; the attention of a shared one is "
                f"the policy's (ppo.critic={critic})"
            )
        if self.critic_learning_rate is not None and critic != "separate":
            raise ValueError(
                "ppo.critic_learning_rate needs ppo.critic=separate; the rate of a shared value head is "
                "ppo.value_head_rate"
            )

    @check
    def _check_idle(self) -> None:
        """Refuse settings without the one that they belong to; with that one set explicitly they may be idle."""
        needed = {
            "kl_target": "kl_controller=ziegler",
            "kl_wait_fraction": "kl_controller=ziegler",
            "surrogate_kl_coef": "policy_loss=kl_penalty_fixed",
            "eval_num_prompts": "eval_every",
        }
        fields = type(self).model_fields
        for name, setting in needed.items():
            value = getattr(self, name)
            of = setting.partition("=")[0]
            if value != fields[name].default and of not in self.model_fields_set:
                raise ValueError(f"ppo.{name}={value} has no effect without ppo.{of}; set ppo.{setting}")

    @check
    def _check_kl_in_groups(self) -> None:
        if self.estimator == "grpo" and self.charges_kl:
            raise ValueError(
                "ppo.advantage=grpo divides by the standard deviation of a group's rewards, so where all scores are "
                "equal, a KL in the reward weighs as much as the score elsewhere, at any ppo.kl_coef; use "
                "ppo.kl_in=loss, as GRPO, or ppo.kl_coef=0"
            )

    @check
    def _check_critic_check(self) -> None:
        match self.critic_check_size:
            case [prompts, _, continuations] if min(prompts, continuations) >= 2:
                pass
            case _:
                raise ValueError(
                    f"ppo.critic_check_size={self.critic_check_size} must be the numbers of prompts, of prefixes of "
                    "each, and of continuations of each prefix, such as [32, 4, 8]; at least 2 of the first and last"
                )
        if self.critic_check is not None and self.resolved_critic == "none":
            raise ValueError(
                f"ppo.critic_check={self.critic_check} checks a critic, and this run has none "
                f"(ppo.advantage={self.estimator}); remove it, or train a critic with ppo.critic=shared"
            )

    @check
    def _check_warmup(self) -> None:
        if self.value_warmup_until is not None and not self.value_warmup_updates:
            raise ValueError(
                "ppo.value_warmup_until ends a warm-up early, and ppo.value_warmup_updates=0 is none; set it to the "
                "most updates that the warm-up may take"
            )
        if 0 < self.num_updates <= self.value_warmup_updates:
            raise ValueError(
                f"ppo.value_warmup_updates={self.value_warmup_updates} leaves no update for the policy; "
                f"it must be below ppo.num_updates={self.num_updates}"
            )
