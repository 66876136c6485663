"""The defaults of an introduction to PPO."""

from kedge.config.presets.recipe import Cited, Preset

__all__ = ["S2_DEFAULTS"]

_TABLE = "S2, table of hyperparameters"

S2_DEFAULTS = Preset(
    name="s2-defaults",
    about="The values that introductions to PPO give: unclipped value loss, an entropy bonus.",
    values={
        "ppo.learning_rate": Cited(1e-5, _TABLE),
        "ppo.num_epochs": Cited(4, _TABLE),
        "ppo.clip_range": Cited(0.2, _TABLE),
        "ppo.value_coef": Cited(0.5, _TABLE),
        "ppo.entropy_coef": Cited(0.01, _TABLE),
        "ppo.value_clip_range": Cited(None, "S2, listing of the total loss: values are not clipped"),
        "ppo.value_loss": Cited("mse", "S2, listing of the total loss: the squared error is not halved"),
        "ppo.value_unit": Cited("score", "S2, listing of the total loss"),
        "ppo.value_head_rate": Cited(1.0, "S2: one optimizer for both"),
    },
)
