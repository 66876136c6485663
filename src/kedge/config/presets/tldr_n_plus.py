"""N+: the open reproduction of TL;DR summarization with Pythia 1B to 6.9B."""

from kedge.config.presets.recipe import Cited, Preset

__all__ = ["TLDR_N_PLUS"]

_SFT = "N+ (arXiv 2403.17031), SFT"
_REWARD = "N+, reward model"
_PPO = "N+, third stage"

TLDR_N_PLUS = Preset(
    name="tldr-n+",
    about="TL;DR summarization with models of 1B to 6.9B parameters (Huang et al. 2024).",
    values={
        "data.max_prompt_tokens": Cited(512, "N+, data: queries of at most 512 tokens"),
        "sft.learning_rate": Cited(3e-6, _SFT),
        "sft.schedule": Cited("cosine", _SFT),
        "sft.num_epochs": Cited(1, _SFT),
        "sft.batch_size": Cited(128, _SFT),
        "reward_model.learning_rate": Cited(3e-6, _REWARD),
        "reward_model.schedule": Cited("cosine", _REWARD),
        "reward_model.num_epochs": Cited(1, _REWARD),
        "reward_model.batch_size": Cited(64, _REWARD),
        "reward_model.normalize": Cited("demonstrations", "N+: the reference summaries score 0 on average"),
        "rollout.num_prompts": Cited(512, f"{_PPO}: batch of 512"),
        "rollout.num_responses": Cited(1, _PPO),
        "rollout.max_new_tokens": Cited(53, _PPO),
        "rollout.temperature": Cited(0.7, _PPO),
        "rollout.missing_eos_score": Cited(-1.0, "N+, the EOS trick"),
        "rollout.missing_eos_mode": Cited("replace", "N+, the EOS trick"),
        "ppo.num_updates": Cited(1953, f"{_PPO}: 1,000,000 episodes, 512 per batch"),
        "ppo.learning_rate": Cited(3e-6, _PPO),
        "ppo.schedule": Cited("linear", _PPO),
        "ppo.num_epochs": Cited(4, _PPO),
        "ppo.num_minibatches": Cited(1, _PPO),
        "ppo.adam_eps": Cited(1e-5, _PPO),
        "ppo.clip_range": Cited(0.2, _PPO),
        "ppo.value_clip_range": Cited(0.2, _PPO),
        "ppo.value_coef": Cited(0.1, _PPO),
        "ppo.entropy_coef": Cited(0.0, _PPO),
        "ppo.kl_coef": Cited(0.05, _PPO),
        "ppo.kl_controller": Cited("fixed", _PPO),
        "ppo.gamma": Cited(1.0, _PPO),
        "ppo.gae_lambda": Cited(0.95, _PPO),
        "ppo.whiten_advantages": Cited(True, _PPO),
        "ppo.whiten_rewards": Cited(False, _PPO),
        "ppo.critic": Cited("separate", "N+: the critic is a separate model"),
        "ppo.critic_init": Cited("reward", "N+: the critic starts as the reward model"),
        "ppo.score_at": Cited("after_last", "N+'s code (ee77a9a): one position after the last token"),
        "ppo.value_unit": Cited("score", _PPO),
    },
)
