"""Ziegler et al.: the first RLHF on language models, with an adaptive KL coefficient."""

from kedge.config.presets.recipe import Cited, Preset

__all__ = ["ZIEGLER"]

_PPO = "Ziegler, lm-human-preferences"

ZIEGLER = Preset(
    name="ziegler",
    about="Stylistic continuation with GPT-2 774M and an adaptive KL coefficient (Ziegler et al. 2019).",
    values={
        "reward_model.normalize_scale": Cited(True, f"{_PPO}: gain and bias give mean 0 and variance 1"),
        "rollout.num_prompts": Cited(512, f"{_PPO}: batch of 512"),
        "rollout.num_responses": Cited(1, _PPO),
        "rollout.temperature": Cited(0.7, _PPO),
        "rollout.missing_eos_score": Cited(-1.0, f"{_PPO}: fixed score without the stop token"),
        "ppo.num_updates": Cited(3906, "Ziegler (arXiv 1909.08593): 2,000,000 episodes, 512 per batch"),
        "ppo.learning_rate": Cited(1e-5, _PPO),
        "ppo.schedule": Cited("linear", _PPO),
        "ppo.num_epochs": Cited(4, _PPO),
        "ppo.num_minibatches": Cited(1, "Ziegler: four epochs with one minibatch each"),
        "ppo.adam_eps": Cited(1e-5, "HFB, on Ziegler's code"),
        "ppo.adam_eps_mode": Cited("tf1", "HFB: the code ran on TensorFlow 1"),
        "ppo.clip_range": Cited(0.2, _PPO),
        "ppo.value_clip_range": Cited(0.2, _PPO),
        "ppo.value_coef": Cited(0.1, _PPO),
        "ppo.entropy_coef": Cited(0.0, _PPO),
        "ppo.kl_coef": Cited(0.15, _PPO),
        "ppo.kl_controller": Cited("ziegler", _PPO),
        "ppo.kl_target": Cited(6.0, _PPO),
        "ppo.kl_wait_fraction": Cited(0.0, _PPO),
        "ppo.kl_horizon": Cited(10_000, _PPO),
        "ppo.gamma": Cited(1.0, _PPO),
        "ppo.gae_lambda": Cited(0.95, _PPO),
        "ppo.whiten_rewards": Cited(True, _PPO),
        "ppo.critic": Cited("shared", f"{_PPO}: a value head on the policy"),
        "ppo.value_unit": Cited("score", _PPO),
        "ppo.value_head_rate": Cited(1.0, "Ziegler: one learning rate for all weights"),
    },
)
