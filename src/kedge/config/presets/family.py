"""The algorithms beside PPO, as the fields in which they differ from it.

Only what makes the algorithm: learning rates and batch sizes depend on the model and the task, and keep their defaults.
"""

from kedge.config.presets.recipe import Cited, Preset

__all__ = ["FAMILY"]

_RLOO, _GRPO, _DR = "RLOO (arXiv 2402.14740)", "GRPO (arXiv 2402.03300)", "Dr. GRPO (arXiv 2503.20783)"
_RPP, _DAPO, _GSPO = "REINFORCE++ (arXiv 2501.03262)", "DAPO (arXiv 2503.14476)", "GSPO (arXiv 2507.18071)"
_CISPO, _SCALE = "MiniMax-M1 (arXiv 2506.13585)", "ScaleRL (arXiv 2510.13786)"
_VAPO, _SAO = "VAPO (arXiv 2504.05118)", "SAO (arXiv 2607.07508)"

RLOO = Preset(
    name="rloo",
    about="REINFORCE with the mean of the prompt's other responses as the baseline (Ahmadian et al. 2024). No critic.",
    values={
        "rollout.num_responses": Cited(4, f"{_RLOO} table 1: k = 2 or 4"),
        "ppo.advantage": Cited("rloo", f"{_RLOO} §2.3"),
        "ppo.policy_loss": Cited("unclipped", f"{_RLOO} §3.2: REINFORCE, without clipping"),
        "ppo.aggregation": Cited("constant", f"{_RLOO} §2.2: a whole response is one action: the sum of its log probs"),
        "ppo.num_epochs": Cited(1, f"{_RLOO} appendix C: 512 responses in two steps of 256, so the ratio stays near 1"),
        "ppo.num_minibatches": Cited(2, f"{_RLOO} appendix C: two gradient steps for each batch"),
        "ppo.kl_coef": Cited(
            0.03, f"{_RLOO} appendix C, for TL;DR; 0.1 for Anthropic-HH; eq. 3: that of the whole response is charged"
        ),
    },
)

GRPO = Preset(
    name="grpo",
    about="Scores normalized within the responses to a prompt, KL in the loss (Shao et al. 2024). No critic.",
    values={
        "rollout.num_prompts": Cited(16, f"{_GRPO} §4.2: 1,024 responses per update, 64 of each question"),
        "rollout.num_responses": Cited(64, f"{_GRPO} §4.2"),
        "ppo.advantage": Cited("grpo", f"{_GRPO} §4.1.2"),
        "ppo.aggregation": Cited("sequence", f"{_GRPO} eq. 3: mean over each response, then over the responses"),
        "ppo.num_epochs": Cited(1, f"{_GRPO} §4.2: a single update following each exploration stage"),
        "ppo.kl_in": Cited("loss", f"{_GRPO} eq. 3"),
        "ppo.kl_estimator": Cited("k3", f"{_GRPO} eq. 4"),
        "ppo.kl_coef": Cited(0.04, f"{_GRPO} §4.2"),
    },
)

DR_GRPO = Preset(
    name="dr-grpo",
    about="GRPO without its two biases: no division by the standard deviation, nor by the length (Liu et al. 2025).",
    values={
        "rollout.num_responses": Cited(8, f"{_DR} table 6"),
        "ppo.advantage": Cited("dr_grpo", f"{_DR} §3.2"),
        "ppo.aggregation": Cited("constant", f"{_DR} §3.2: the sum over the tokens, divided by a constant"),
        "ppo.num_epochs": Cited(1, f"{_DR} table 6"),
        "ppo.kl_coef": Cited(0.0, f"{_DR} table 6"),
    },
)

REINFORCE_PLUS_PLUS = Preset(
    name="reinforce++",
    about="PPO's loss with the whitened reward to go instead of a critic (Hu et al. 2025). One response is enough.",
    values={"ppo.advantage": Cited("reinforce++", f"{_RPP} v9, eq. 4 and 5: score minus KL to go, whitened")},
)

DAPO = Preset(
    name="dapo",
    about="GRPO with a higher upper clip, the mean over tokens, dynamic sampling, and no KL (Yu et al. 2025). Its soft "
    "penalty for long responses is a reward: kedge.rewards.penalties:too_long.",
    values={
        "rollout.num_responses": Cited(16, f"{_DAPO} §4.1"),
        "ppo.advantage": Cited("grpo", f"{_DAPO} eq. 9"),
        "ppo.clip_range_high": Cited(0.28, f"{_DAPO} §4.1"),
        "ppo.constant_groups": Cited("resample", f"{_DAPO} §3.2, eq. 11: dynamic sampling"),
        "ppo.num_epochs": Cited(1, f"{_DAPO} §4.1: 8,192 responses in steps of 512"),
        "ppo.num_minibatches": Cited(16, f"{_DAPO} §4.1: 16 gradient updates for each rollout step"),
        "ppo.kl_coef": Cited(0.0, f"{_DAPO} §2.3"),
    },
)

GSPO = Preset(
    name="gspo",
    about="GRPO with the ratio of whole responses, the geometric mean over their tokens (Zheng et al. 2025).",
    values={
        "rollout.num_responses": Cited(16, f"kedge: the paper gives no number; as in {_DAPO}"),
        "ppo.advantage": Cited("grpo", f"{_GSPO} eq. 6"),
        "ppo.ratio": Cited("sequence", f"{_GSPO} eq. 7"),
        "ppo.aggregation": Cited("sequence", f"{_GSPO} eq. 5: the mean over the responses"),
        "ppo.clip_range": Cited(3e-4, f"{_GSPO} §5.1"),
        "ppo.clip_range_high": Cited(4e-4, f"{_GSPO} §5.1"),
        "ppo.num_epochs": Cited(1, f"{_GSPO} §5.1 has minibatches, and no second pass"),
        "ppo.num_minibatches": Cited(4, f"{_GSPO} §5.1: each batch is partitioned into four minibatches"),
        "ppo.kl_coef": Cited(0.0, f"{_GSPO} omits the KL term from its formulas for brevity, and names no coefficient"),
    },
)

CISPO = Preset(
    name="cispo",
    about="GRPO's advantages with capped importance weights, so that no token loses its gradient (MiniMax 2025).",
    values={
        "rollout.num_responses": Cited(16, f"{_SCALE}, as quoted in TRL's paper index; {_CISPO} gives no number"),
        "ppo.advantage": Cited("grpo", f"{_CISPO} eq. 2"),
        "ppo.policy_loss": Cited("cispo", f"{_CISPO} eq. 4 and 5, without the lower bound"),
        "ppo.clip_range_high": Cited(
            4.0, f"{_SCALE}, as in TRL's paper index: weights of up to 5; {_CISPO} gives no value"
        ),
        "ppo.constant_groups": Cited("resample", f"{_CISPO} §3.1: dynamic sampling, as in DAPO"),
        "ppo.num_epochs": Cited(1, f"{_CISPO} §3.1: steps on the minibatches of a generation batch"),
        "ppo.num_minibatches": Cited(16, f"{_CISPO} §3.1: 16 rounds of off-policy updates per generation batch"),
        "ppo.kl_coef": Cited(0.0, f"{_CISPO} §3.1: no KL term"),
    },
)

VAPO = Preset(
    name="vapo",
    about="PPO for long chains of thought: a critic trained on plain returns and warmed up, λ by length, and a higher "
    "upper clip (Yue et al. 2025).",
    values={
        "rollout.num_responses": Cited(16, f"{_VAPO} §5.1: 512 prompts, 16 responses each"),
        "ppo.critic": Cited("separate", f"{_VAPO} §5.1: a value network that starts from a reward model"),
        "ppo.value_warmup_updates": Cited(50, f"{_VAPO} §5.1: 50 steps; §4.1: value pretraining"),
        "ppo.value_gae_lambda": Cited(1.0, f"{_VAPO} §4.1: decoupled GAE"),
        "ppo.gae_lambda": Cited("length_adaptive", f"{_VAPO} §4.2, eq. 5, with α = 0.05"),
        "ppo.clip_range_high": Cited(0.28, f"{_VAPO} §5.1; §4.3: clip higher"),
        "ppo.positive_nll_coef": Cited(0.1, f"{_VAPO} §5.1; §4.3: the positive-example loss"),
        "ppo.num_epochs": Cited(1, f"{_VAPO} §5.1: 8,192 responses in steps of 512, as in DAPO"),
        "ppo.num_minibatches": Cited(16, f"{_VAPO} §5.1: minibatches of 512"),
        "ppo.kl_coef": Cited(0.0, f"{_VAPO} eq. 10: no KL term"),
    },
)

SAO = Preset(
    name="sao",
    about="PPO with one response per prompt for stale samples: tokens outside the clip range are masked on both sides, "
    "and the critic is trained more than the policy (Hou et al. 2026).",
    values={
        "ppo.policy_loss": Cited("double_sided", f"{_SAO} §3.1: direct double-sided importance sampling"),
        "ppo.old_logprobs": Cited("sampler", f"{_SAO} §3.1: the ratio to the policy that sampled"),
        "rollout.max_staleness": Cited(1, f"{_SAO} samples while it trains; kedge: one update ahead"),
        "ppo.clip_range": Cited(0.3, f"{_SAO} §4.1, for mathematics; 0.8 for code"),
        "ppo.clip_range_high": Cited(5.0, f"{_SAO} §4.1, for mathematics; 3 for code"),
        "ppo.critic": Cited("separate", f"{_SAO} §3.2"),
        "ppo.num_critic_epochs": Cited(2, f"{_SAO} §3.2: K = 2 critic updates per policy update"),
        "ppo.value_warmup_updates": Cited(
            10, f"{_SAO} §4.1: 10 steps of warm-up for the critic; some ports read them as those of its learning rate"
        ),
        "ppo.value_gae_lambda": Cited(1.0, f"{_SAO} §4.1"),
        "ppo.gae_lambda": Cited("length_adaptive", f"{_SAO} §4.1"),
        "ppo.length_adaptive_alpha": Cited(1.5, f"{_SAO} §4.1"),
        "ppo.num_epochs": Cited(1, f"{_SAO} §3.2: one policy update per batch"),
        "ppo.kl_coef": Cited(0.0, f"{_SAO} §3.1: no KL term in its objective"),
    },
)

FAMILY = (RLOO, GRPO, DR_GRPO, REINFORCE_PLUS_PLUS, DAPO, GSPO, CISPO, VAPO, SAO)
"""In the order of `kedge config presets`."""
