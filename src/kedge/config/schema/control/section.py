"""`control`: the section, with fields from several files."""

from pydantic import model_validator

from kedge.config.schema.control.atari import AtariConfig
from kedge.config.schema.control.environment import EnvironmentConfig
from kedge.config.schema.control.loop import ControlLoopConfig
from kedge.config.schema.control.network import NetworkConfig
from kedge.config.schema.control.objective import ControlObjectiveConfig
from kedge.config.schema.field import field

__all__ = ["ControlConfig"]


class ControlConfig(ControlObjectiveConfig, ControlLoopConfig, NetworkConfig, AtariConfig, EnvironmentConfig):
    """PPO on Gymnasium's environments. The defaults are those of PPO on MuJoCo."""

    eval_every: int | None = field(
        None,
        ge=1,
        meaning="Updates between two evaluations, and at the end: episodes with the most likely actions, in copies of "
        "their own. Null: none. It never changes what is trained.",
        source="kedge: off; the returns of training are logged in any case",
        too_high="the best policy lies between two evaluations",
        too_low="evaluations take longer than training",
    )
    eval_episodes: int = field(
        10,
        ge=1,
        meaning="Episodes per evaluation.",
        source="Stable-Baselines3 plays 5",
        too_high="evaluations are slow",
        too_low="the mean is mostly luck",
    )
    video: bool = field(
        False,
        meaning="Whether the report shows an episode of the trained policy, rendered off-screen (episode.webp).",
        source="kedge: off, because it needs a renderer",
    )

    @property
    def steps_per_update(self) -> int:
        """Environment steps of an update."""
        return self.num_envs * self.num_steps

    @property
    def num_updates(self) -> int:
        """Updates of the run."""
        return self.total_steps // self.steps_per_update

    @model_validator(mode="after")
    def _check_sizes(self) -> "ControlConfig":
        steps = self.steps_per_update
        product = f"control.num_envs={self.num_envs} × control.num_steps={self.num_steps}"
        if steps % self.num_minibatches:
            raise ValueError(
                f"control.num_minibatches={self.num_minibatches} does not divide an update's {steps} steps ({product})"
            )
        if not self.num_updates:
            raise ValueError(
                f"control.total_steps={self.total_steps} is less than one update of {steps} steps ({product})"
            )
        return self

    @model_validator(mode="after")
    def _check_memory(self) -> "ControlConfig":
        if self.memory_size and self.critic != "shared":
            raise ValueError("control.memory_size needs a critic that reads the same memory: control.critic=shared")
        return self

    @model_validator(mode="after")
    def _check_trpo(self) -> "ControlConfig":
        if self.algorithm != "trpo":
            return self
        if self.policy_loss != "clipped":
            raise ValueError(
                f"control.policy_loss={self.policy_loss} is PPO's; control.algorithm=trpo has its own: leave it out"
            )
        for name, value in (("entropy_coef", self.entropy_coef), ("early_stop_kl", self.early_stop_kl)):
            if value:
                raise ValueError(
                    f"control.{name}={value} has no effect on the one step of control.algorithm=trpo; leave it out"
                )
        return self

    @model_validator(mode="after")
    def _check_compile(self) -> "ControlConfig":
        if self.compile is not True:
            return self
        if self.algorithm != "ppo":
            raise ValueError(
                f"control.compile=true compiles the steps of PPO, and control.algorithm={self.algorithm} has "
                "others; leave it out"
            )
        if self.memory_size:
            raise ValueError(
                "control.compile=true needs rows of one length, and with control.memory_size they are pieces of "
                "episodes; leave it out"
            )
        if self.early_stop_kl is not None:
            raise ValueError(
                "control.early_stop_kl needs the KL of every step before the next, and with control.compile=true it is "
                "known after the update; use control.compile=false"
            )
        return self
