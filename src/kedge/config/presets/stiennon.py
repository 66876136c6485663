"""Stiennon et al.: the first summarizer that beat the human references."""

from kedge.config.presets.recipe import Cited, Preset

__all__ = ["STIENNON"]

_PAPER = "Stiennon, appendix B.1"
_TASK = "Stiennon's code (7009674), experiment_helpers.py"
_LINEAGE = "not given; as in Ziegler, whose code it builds on"

STIENNON = Preset(
    name="stiennon",
    about="TL;DR summarization with a model of 1.3B parameters (Stiennon et al. 2020).",
    values={
        "data.max_prompt_tokens": Cited(512, f"{_TASK}:201"),
        "data.max_length": Cited(640, f"{_TASK}:201, 371: 512 and, for the reward model, 128"),
        "sft.learning_rate": Cited(6.35e-5, f"{_PAPER}, 1.3B"),
        "sft.schedule": Cited("cosine", _PAPER),
        "sft.num_epochs": Cited(1, _PAPER),
        "sft.batch_size": Cited(128, _PAPER),
        "reward_model.learning_rate": Cited(1.5e-5, f"{_PAPER}, 1.3B"),
        "reward_model.num_epochs": Cited(1, _PAPER),
        "reward_model.batch_size": Cited(64, _PAPER),
        "reward_model.schedule": Cited("cosine", _PAPER),
        "reward_model.normalize": Cited("demonstrations", "Stiennon: reference summaries score 0 on average"),
        "rollout.num_prompts": Cited(512, f"{_PAPER}, 1.3B: batch of 512"),
        "rollout.num_responses": Cited(1, _PAPER),
        "rollout.max_new_tokens": Cited(48, f"{_TASK}:202"),
        "rollout.stop_token": Cited(None, f"{_TASK}:206: EOS"),
        "ppo.num_updates": Cited(1953, f"{_PAPER}: 1,000,000 episodes, 512 per batch"),
        "ppo.learning_rate": Cited(1.5e-5, f"{_PAPER}, 1.3B"),
        "ppo.schedule": Cited("linear", _PAPER),
        "ppo.num_epochs": Cited(4, _PAPER),
        "ppo.kl_coef": Cited(0.05, _PAPER),
        "ppo.kl_controller": Cited("fixed", _PAPER),
        "ppo.gamma": Cited(1.0, _PAPER),
        "ppo.gae_lambda": Cited(0.95, _PAPER),
        "ppo.entropy_coef": Cited(0.0, f"{_PAPER}: none"),
        "ppo.critic": Cited("separate", "Stiennon: separate parameters, so that the value loss cannot harm the policy"),
        "ppo.critic_init": Cited("reward", "Stiennon: the critic starts as the reward model"),
        "ppo.value_coef": Cited(0.1, _LINEAGE),
        "ppo.value_unit": Cited("score", _LINEAGE),
        "ppo.value_clip_range": Cited(0.2, _LINEAGE),
    },
)
