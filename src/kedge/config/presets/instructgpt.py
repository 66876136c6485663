"""InstructGPT: instruction following, the recipe that made the three stages standard."""

from kedge.config.presets.recipe import Cited, Preset

__all__ = ["INSTRUCTGPT"]

_SFT = "InstructGPT (arXiv 2203.02155), appendix C.1"
_REWARD = "InstructGPT, appendix C.2"
_PPO = "InstructGPT, appendix C.4"
_LINEAGE = "not given; as in Ziegler, whose code it builds on"

INSTRUCTGPT = Preset(
    name="instructgpt",
    about="Instruction following (Ouyang et al. 2022), the models without ptx. For PPO-ptx add ppo.ptx_coef=27.8 "
    "and data.pretraining.",
    values={
        "sft.learning_rate": Cited(9.65e-6, f"{_SFT}, 1.3B and 6B"),
        "sft.num_epochs": Cited(16, f"{_SFT}; there with residual dropout of 0.2"),
        "sft.batch_size": Cited(32, _SFT),
        "sft.schedule": Cited("cosine", f"{_SFT}; there to a tenth of the peak, here to 0"),
        "reward_model.learning_rate": Cited(9e-6, f"{_REWARD}, 6B"),
        "reward_model.schedule": Cited("cosine", f"{_REWARD}; there to a tenth of the peak, here to 0"),
        "reward_model.num_epochs": Cited(1, _REWARD),
        "reward_model.batch_size": Cited(64, f"{_REWARD}: prompts, each with its 4 to 9 ranked responses"),
        "rlhf.num_responses": Cited(4, "InstructGPT §3.5: 4 to 9"),
        "rollout.num_prompts": Cited(512, f"{_PPO}: batch of 512"),
        "rollout.num_responses": Cited(1, _PPO),
        "rollout.temperature": Cited(1.0, _PPO),
        "ppo.num_updates": Cited(500, f"{_PPO}: 256,000 episodes, 512 per batch"),
        "ppo.schedule": Cited("constant", _PPO),
        "ppo.warmup_fraction": Cited(0.02, f"{_PPO}: the first 10 iterations"),
        "ppo.num_epochs": Cited(1, _PPO),
        "ppo.num_minibatches": Cited(8, f"{_PPO}: minibatches of 64"),
        "ppo.clip_range": Cited(0.2, _PPO),
        "ppo.kl_coef": Cited(0.02, _PPO),
        "ppo.kl_controller": Cited("fixed", _PPO),
        "ppo.gamma": Cited(1.0, f"{_PPO}: no discount"),
        "ppo.gae_lambda": Cited(0.95, _LINEAGE),
        "ppo.critic": Cited("separate", "InstructGPT §3.5: a separate value function"),
        "ppo.critic_init": Cited("reward", "InstructGPT §3.5: the critic starts as the reward model"),
        "ppo.value_unit": Cited("score", _LINEAGE),
        "ppo.value_clip_range": Cited(0.2, _LINEAGE),
    },
)
