"""Settings that mean the same in every system, and what they are called in kedge."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

QUIET: Final[Mapping[str, Any]] = {
    "runtime.num_threads": 1,
    "runtime.report": False,
    "checkpoint.every.minutes": None,
    "checkpoint.keep_best": "none",
}
"""Of kedge's runs: one thread, and no files that the benchmark does not read."""


@dataclass(frozen=True)
class Recipe:
    """PPO on an environment, with two networks of two layers of 64 units.

    Attributes:
        env: Gymnasium's id.
        num_envs: Copies of the environment.
        num_steps: Steps of each per update.
        num_epochs: Passes over them.
        num_minibatches: Optimizer steps per pass.
        learning_rate: Adam's, which falls to 0 over the run.
        gamma: γ.
        gae_lambda: λ.
        clip_range: ε.
        entropy_coef: Weight of the entropy bonus.
        max_grad_norm: Bound of the gradient's norm.
        normalizes: Whether observations and rewards are normalized by running statistics.
        early_stop_kl: The policy's steps of an update end at 1.5 times this KL; None: they do not.
    """

    env: str
    num_envs: int = 1
    num_steps: int = 2048
    num_epochs: int = 10
    num_minibatches: int = 32
    learning_rate: float = 3e-4
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip_range: float = 0.2
    entropy_coef: float = 0.0
    max_grad_norm: float | None = 0.5
    normalizes: bool = True
    early_stop_kl: float | None = None

    @property
    def steps_per_update(self) -> int:
        """Environment steps of an update."""
        return self.num_envs * self.num_steps


@dataclass(frozen=True)
class ClassicRecipe(Recipe):
    """PPO on CartPole, as in kedge's preset `classic-control`.

    Attributes:
        num_envs: Copies of the environment, as in the next fields.
        num_steps: Steps of each per update.
        num_minibatches: Optimizer steps per pass.
        learning_rate: Adam's.
        normalizes: Observations are as they are.
        early_stop_kl: The advantages of a solved task are noise, which a full update follows too far.
        scales_rewards: Rewards are divided by the deviation of their discounted sum: the critic learns faster.
    """

    num_envs: int = 8
    num_steps: int = 64
    num_minibatches: int = 2
    learning_rate: float = 2e-3
    normalizes: bool = False
    early_stop_kl: float | None = 0.01
    scales_rewards: bool = True


@dataclass(frozen=True)
class AtariRecipe(Recipe):
    """PPO on a game from its frames: the network of Mnih et al. 2015, shared by policy and critic.

    Attributes:
        num_envs: As in PPO's table 5, like the next fields.
        num_steps: Steps of each per update; four frames per step.
        num_epochs: Passes over them.
        num_minibatches: Optimizer steps per pass.
        learning_rate: Adam's.
        clip_range: ε; constant, which it is not there.
        entropy_coef: Weight of the entropy bonus.
        normalizes: Rewards are signs instead, and observations frames.
        value_coef: Weight of half the squared error.
        options: Arguments of the environment: no action is repeated at random.
    """

    num_envs: int = 8
    num_steps: int = 128
    num_epochs: int = 3
    num_minibatches: int = 4
    learning_rate: float = 2.5e-4
    clip_range: float = 0.1
    entropy_coef: float = 0.01
    normalizes: bool = False
    value_coef: float = 1.0
    options: Mapping[str, Any] = field(default_factory=lambda: {"repeat_action_probability": 0.0})


@dataclass(frozen=True)
class TrpoRecipe(Recipe):
    """TRPO with a critic trained by Adam.

    Attributes:
        num_minibatches: Of the critic.
        learning_rate: The critic's; constant.
        max_grad_norm: None.
        trpo_kl: δ, the bound of the KL of a step.
        trpo_damping: Added to the Fisher matrix's diagonal.
        trpo_iterations: Of the conjugate gradients.
    """

    num_minibatches: int = 16
    learning_rate: float = 1e-3
    max_grad_norm: float | None = None
    trpo_kl: float = 0.01
    trpo_damping: float = 0.1
    trpo_iterations: int = 10


RECIPES: Final[Mapping[str, Recipe]] = {
    "HalfCheetah-v5": Recipe("HalfCheetah-v5"),
    "Hopper-v5": Recipe("Hopper-v5"),
    "ALE/Pong-v5": AtariRecipe("ALE/Pong-v5"),
    "CartPole-v1": ClassicRecipe("CartPole-v1"),
}


def recipe_of(fields: Mapping[str, Any]) -> Recipe:
    """The recipe with these fields."""
    own = {"options": AtariRecipe, "trpo_kl": TrpoRecipe, "scales_rewards": ClassicRecipe}
    return next((kind for name, kind in own.items() if name in fields), Recipe)(**fields)


def kedge_settings(recipe: Recipe) -> dict[str, Any]:
    """A recipe as kedge's settings."""
    fields = ("num_envs", "num_steps", "num_epochs", "num_minibatches", "learning_rate", "gamma", "gae_lambda")
    more = ("clip_range", "entropy_coef", "max_grad_norm", "early_stop_kl")
    common = {f"control.{name}": getattr(recipe, name) for name in fields + more}
    if isinstance(recipe, AtariRecipe):
        own = {"value_coef": recipe.value_coef, "anneal_clip_range": False, "env_options": dict(recipe.options)}
        return {"preset": "atari", **common, **{f"control.{name}": value for name, value in own.items()}}
    if isinstance(recipe, TrpoRecipe):
        common |= {"preset": "trpo", "control.kl_target": recipe.trpo_kl}
    return {
        **common,
        "control.normalize_observations": recipe.normalizes,
        "control.reward_scaling": "std" if recipe.normalizes or isinstance(recipe, ClassicRecipe) else "none",
    }
