"""Stiennon et al.: the first summarizer that beat the human references."""

from kedge.config.presets.recipe import Cited, Preset

__all__ = ["STIENNON"]

_PPO = "Stiennon, third stage"

STIENNON = Preset(
    name="stiennon",
    about="TL;DR summarization with a model of 1.3B parameters (Stiennon et al. 2020).",
    values={
        "reward_model.num_epochs": Cited(1, "Stiennon, reward model"),
        "reward_model.batch_size": Cited(64, "Stiennon, reward model"),
        "reward_model.schedule": Cited("cosine", "Stiennon, reward model"),
        "reward_model.normalize": Cited("demonstrations", "Stiennon: reference summaries score 0 on average"),
        "rollout.num_prompts": Cited(512, f"{_PPO}: batch of 512"),
        "rollout.num_responses": Cited(1, _PPO),
        "ppo.num_updates": Cited(1953, f"{_PPO}: 1,000,000 episodes, 512 per batch"),
        "ppo.learning_rate": Cited(1.5e-5, f"{_PPO}, 1.3B"),
        "ppo.schedule": Cited("linear", _PPO),
        "ppo.num_epochs": Cited(4, _PPO),
        "ppo.kl_coef": Cited(0.05, _PPO),
        "ppo.kl_controller": Cited("fixed", _PPO),
        "ppo.gamma": Cited(1.0, _PPO),
        "ppo.gae_lambda": Cited(0.95, _PPO),
        "ppo.value_coef": Cited(0.1, f"{_PPO}: as in Ziegler"),
        "ppo.entropy_coef": Cited(0.0, f"{_PPO}: none"),
        "ppo.critic": Cited("separate", "Stiennon: separate parameters, so that the value loss cannot harm the policy"),
        "ppo.critic_init": Cited("reward", "Stiennon: the critic starts as the reward model"),
        "ppo.value_unit": Cited("score", _PPO),
    },
)
