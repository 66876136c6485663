"""Ziegler et al.: the first RLHF on language models, with an adaptive KL coefficient."""

from kedge.config.presets.recipe import Cited, Preset

__all__ = ["ZIEGLER"]

_CODE = "Ziegler's code (cbfd210)"
_LAUNCH, _TASKS, _CORE = f"{_CODE}, launch.py", f"{_CODE}, lm_tasks.py", f"{_CODE}, utils/core.py"
_REWARD, _PPO = f"{_CODE}, train_reward.py", f"{_CODE}, train_policy.py"
_ADAM = "TensorFlow 1's Adam"
_NO_CLIP = "the gradient is not clipped"

ZIEGLER = Preset(
    name="ziegler",
    about="Stylistic continuation with GPT-2 124M and an adaptive KL coefficient: the published code (Ziegler et al. "
    "2019). The paper's runs with 774M have larger batches and steps.",
    values={
        "data.max_prompt_tokens": Cited(64, f"{_LAUNCH}:9"),
        "data.max_length": Cited(88, f"{_LAUNCH}:9, 11: 64 and 24"),
        "reward_model.learning_rate": Cited(5e-5, f"{_LAUNCH}:62"),
        "reward_model.schedule": Cited("linear", f"{_REWARD}:249"),
        "reward_model.warmup_fraction": Cited(0.0, f"{_REWARD}:249"),
        "reward_model.num_epochs": Cited(1, f"{_REWARD}:245"),
        "reward_model.batch_size": Cited(32, f"{_LAUNCH}:61: the best of 4 responses each; here ranked lists or pairs"),
        "reward_model.adam_eps": Cited(1e-5, f"{_CORE}:627"),
        "reward_model.adam_eps_mode": Cited("tf1", f"{_CORE}:627: {_ADAM}; also HFB"),
        "reward_model.weight_decay": Cited(0.0, f"{_CORE}:627"),
        "reward_model.max_grad_norm": Cited(None, f"{_CORE}:621–629: {_NO_CLIP}"),
        "reward_model.normalize_scale": Cited(
            True,
            f"{_REWARD}:252–254: mean 0 and variance 1, there on the policy's samples, here on the data's responses",
        ),
        "rollout.num_prompts": Cited(512, f"{_LAUNCH}:124"),
        "rollout.num_responses": Cited(1, f"{_PPO}:284–285"),
        "rollout.max_new_tokens": Cited(24, f"{_LAUNCH}:11"),
        "rollout.temperature": Cited(0.7, f"{_LAUNCH}:17"),
        "rollout.stop_token": Cited(
            ".", f"{_LAUNCH}:14–15: a full stop; there only from the 17th token on, and all 24 tokens are trained"
        ),
        "rollout.missing_eos_score": Cited(-1.0, f"{_TASKS}:32"),
        "rollout.missing_eos_mode": Cited("replace", f"{_PPO}:390"),
        "ppo.num_updates": Cited(1954, f"{_LAUNCH}:123; {_PPO}:79: 1,000,000 episodes, 512 per batch, rounded up"),
        "ppo.learning_rate": Cited(1e-5, f"{_LAUNCH}:122"),
        "ppo.schedule": Cited("linear", f"{_PPO}:172–173"),
        "ppo.warmup_fraction": Cited(0.0, f"{_PPO}:172–173"),
        "ppo.num_epochs": Cited(4, f"{_PPO}:51"),
        "ppo.num_minibatches": Cited(1, f"{_PPO}:50"),
        "ppo.early_stop_kl": Cited(None, f"{_PPO}:184–193: no early stop"),
        "ppo.adam_eps": Cited(1e-5, f"{_CORE}:627"),
        "ppo.adam_eps_mode": Cited("tf1", f"{_CORE}:627: {_ADAM}; also HFB"),
        "ppo.weight_decay": Cited(0.0, f"{_CORE}:627"),
        "ppo.max_grad_norm": Cited(None, f"{_CORE}:621–629: {_NO_CLIP}"),
        "ppo.policy_loss": Cited("clipped", f"{_PPO}:352–354"),
        "ppo.clip_range": Cited(0.2, f"{_PPO}:54"),
        "ppo.aggregation": Cited("token", f"{_PPO}:354"),
        "ppo.entropy_coef": Cited(0.0, f"{_PPO}:357"),
        "ppo.kl_coef": Cited(0.15, f"{_LAUNCH}:129"),
        "ppo.kl_in": Cited("reward", f"{_PPO}:149–153"),
        "ppo.kl_scope": Cited("token", f"{_PPO}:149–153"),
        "ppo.kl_estimator": Cited("k1", f"{_PPO}:150"),
        "ppo.kl_controller": Cited("ziegler", f"{_LAUNCH}:130"),
        "ppo.kl_target": Cited(6.0, f"{_LAUNCH}:131"),
        "ppo.kl_wait_fraction": Cited(0.0, f"{_PPO}:305"),
        "ppo.kl_horizon": Cited(10_000, f"{_PPO}:28"),
        "ppo.critic": Cited("shared", f"{_CODE}, policy.py:28"),
        "ppo.value_head_init": Cited("zero", f"{_CODE}, language/model.py:368"),
        "ppo.value_head_rate": Cited(1.0, f"{_PPO}:177: one learning rate for all weights"),
        "ppo.value_coef": Cited(0.1, f"{_PPO}:53"),
        "ppo.value_loss": Cited("half_mse", f"{_PPO}:347"),
        "ppo.value_unit": Cited("score", f"{_PPO}:344–347; of the whitened rewards"),
        "ppo.value_clip_range": Cited(0.2, f"{_PPO}:55"),
        "ppo.value_warmup_updates": Cited(0, f"{_PPO}:357"),
        "ppo.advantage": Cited("gae", f"{_PPO}:327–336"),
        "ppo.gamma": Cited(1.0, f"{_PPO}:56"),
        "ppo.gae_lambda": Cited(0.95, f"{_PPO}:57"),
        "ppo.whiten_advantages": Cited(True, f"{_PPO}:338; there over the responses of each GPU"),
        "ppo.whiten_rewards": Cited(True, f"{_PPO}:58, 325: the mean is kept; there over the responses of each GPU"),
        "ppo.score_at": Cited("last", f"{_PPO}:153"),
    },
)
