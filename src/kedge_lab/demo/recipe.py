"""Sizes and settings of the demo.

They are chosen to finish within minutes on a CPU: models that fit into its cache, short texts, and learning rates that
only models of this size tolerate.
"""

from __future__ import annotations

DURATION = "two to four minutes on two cores"
"""Measured in `handbook/demo.json`; a test compares it with the documentation."""

NUM_TOKENIZER_TEXTS = 1500
VOCAB_SIZE = 1280
"""Enough for every word of the world to be one token."""
MODEL = {
    "hidden_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "context_length": 256,
    "initializer_range": 0.12,
}
MAX_PROMPT_TOKENS = 136
"""Longer posts lose their last paragraphs."""
MAX_NEW_TOKENS = 40
TEMPERATURE = 0.7
"""Sampling temperature in training and evaluation, as in Ziegler and N+."""

NUM_DEMONSTRATIONS = 14_000
NUM_COMPARISONS = 2000
"""Pairs of reference summaries."""
NUM_SAMPLED_COMPARISONS = 1500
"""Pairs of SFT samples, which show mistakes that no author makes."""
NUM_HELD_OUT = 256
"""Posts of the final evaluation."""
NUM_NORMALIZATION = 256
"""Demonstrations on which the reward model's mean score is set to 0."""
NUM_PROMPTS = 2048
"""Posts in the PPO prompt set."""
NUM_CURVE_POSTS = 96
"""Number of posts, from a separate set, for the overoptimization curve."""
CURVE_EVERY = 2
"""Updates between points of the curve."""

CRITIC = {
    "ppo.critic": "separate",  # from the reward model; a head on the policy's trunk explains nothing in a short run
    "ppo.critic_learning_rate": 2e-3,  # the reward model's: both are regressions that start from the policy's weights
    "ppo.value_gae_lambda": 1.0,  # its targets are the sampled returns
    "ppo.gae_lambda": 0.95,  # it explains enough of the returns to remove some of their noise from the advantages
    "ppo.value_clip_range": None,  # its first values are the reward model's outputs before the last token: noise
    "ppo.value_warmup_updates": 2,  # so that the policy does not follow that noise
}
"""The critic of both PPO runs; bench/defaults/RESULTS.md has the measurements."""

SETTINGS = {
    "data.max_prompt_tokens": MAX_PROMPT_TOKENS,
    "data.max_length": 192,
    "data.eval_fraction": 0.04,
    "sft.learning_rate": 6e-3,
    "sft.batch_size": 16,
    "sft.schedule": {"cosine": 0.05},
    "reward_model.learning_rate": 2e-3,
    "reward_model.batch_size": 32,
    "reward_model.schedule": {"cosine": 0.05},
    "optimization.stages": {"sft": {"adam_eps": 1e-8}, "reward_model": {"adam_eps": 1e-8}},
    "rollout.num_prompts": 128,
    "rollout.max_new_tokens": MAX_NEW_TOKENS,
    "rollout.temperature": TEMPERATURE,
    "ppo.num_updates": 16,
    "ppo.learning_rate": 3e-4,
    "ppo.num_epochs": 2,
    "ppo.num_minibatches": 4,
    "ppo.kl_coef": 0.1,
    **CRITIC,
    "runtime.precision": "fp32",
}

WITHOUT_KL_SETTINGS = {
    "ppo.kl_coef": 0.0,
    "ppo.measure_kl": True,
    "ppo.num_updates": 20,
    "ppo.learning_rate": 1e-3,
    "ppo.schedule": "constant",
    "ppo.clip_range": 0.1,
    "ppo.value_warmup_updates": 0,
}
"""Changes for the second PPO run: no KL penalty, and steps large enough, from the first update on, to overoptimize
within these updates."""
