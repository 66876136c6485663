"""Models of up to about 5M parameters on a laptop CPU."""

from kedge.config.presets.recipe import Cited, Preset

__all__ = ["SMALL_CPU"]

_RATE = "kedge: small models need, and tolerate, 100 times the learning rate of 1B models"
_FEW = "kedge: a run takes minutes on two cores"

SMALL_CPU = Preset(
    name="small-cpu",
    about="Models of up to about 5M parameters on two CPU cores.",
    values={
        "data.max_prompt_tokens": Cited(256, "kedge: small models have short contexts"),
        "data.max_length": Cited(512, "kedge: small models have short contexts"),
        "sft.learning_rate": Cited(1e-3, _RATE),
        "sft.batch_size": Cited(32, f"{_FEW}; small datasets still give a few hundred steps"),
        "sft.num_epochs": Cited(3, f"{_FEW}; small models do not overfit as fast"),
        "reward_model.learning_rate": Cited(5e-4, _RATE),
        "reward_model.batch_size": Cited(32, f"{_FEW}; small datasets still give a few hundred steps"),
        "critic.learning_rate": Cited(5e-4, _RATE),
        "critic.batch_size": Cited(32, f"{_FEW}; small datasets still give a few hundred steps"),
        "rollout.num_prompts": Cited(64, _FEW),
        "rollout.max_new_tokens": Cited(48, _FEW),
        "ppo.num_updates": Cited(60, _FEW),
        "ppo.learning_rate": Cited(
            1e-4, "kedge, measured (docs/defaults.md): at 4e-4 the first update may clip a fifth of the tokens"
        ),
        "ppo.num_epochs": Cited(4, "S2, N+"),
        "ppo.num_minibatches": Cited(1, "Ziegler, N+"),
    },
)
