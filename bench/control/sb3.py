# pyright: reportMissingImports=false
"""`python sb3.py ORDER.json OUT.json`: one run of Stable-Baselines3's PPO, in an environment that has it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_atari_env
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack, VecNormalize

WINDOW = 100
NETWORKS = {"net_arch": {"pi": [64, 64], "vf": [64, 64]}, "activation_fn": torch.nn.Tanh}
"""For vectors; those for frames are the library's own, which are the same as kedge's."""


class Marks(BaseCallback):
    """Notes steps, CPU seconds, wall seconds and mean return before each rollout, and stops at a return."""

    def __init__(self, stop_at: float | None) -> None:
        super().__init__()
        self.stop_at = stop_at
        self.rows: list[list[float | None]] = []
        self.cpu = time.process_time()
        self.wall = time.perf_counter()

    def note(self) -> float | None:
        """Add a row; returns the mean return."""
        latest = [episode["r"] for episode in self.model.ep_info_buffer or ()]
        mean = float(np.mean(latest)) if len(latest) >= WINDOW else None
        self.rows.append([self.num_timesteps, time.process_time() - self.cpu, time.perf_counter() - self.wall, mean])
        return mean

    def _on_rollout_start(self) -> None:
        if self.num_timesteps:
            self.note()

    def _on_step(self) -> bool:
        # A callback ends training at a step only: at the first one after the update that reached the return.
        reached = self.rows[-1][3] if self.rows else None
        return self.stop_at is None or reached is None or reached < self.stop_at


def environments(recipe: Mapping[str, Any]) -> Any:
    """The environments of a recipe, as the library wraps them."""
    if "options" in recipe:
        import ale_py

        gymnasium.register_envs(ale_py)
        options = {"frameskip": 1, **recipe["options"]}
        games = make_atari_env(recipe["env"], n_envs=recipe["num_envs"], env_kwargs=options, vec_env_cls=DummyVecEnv)
        return VecFrameStack(games, n_stack=4)
    envs: Any = DummyVecEnv([lambda: Monitor(gymnasium.make(recipe["env"])) for _ in range(recipe["num_envs"])])
    if not (recipe["normalizes"] or recipe.get("scales_rewards")):
        return envs
    return VecNormalize(envs, norm_obs=recipe["normalizes"], gamma=recipe["gamma"], clip_obs=10.0, clip_reward=10.0)


def main(order: Mapping[str, Any]) -> dict[str, Any]:
    """Run an order; the outcome is that of `bench.control.own`."""
    torch.set_num_threads(1)
    recipe = order["recipe"]
    seed = order["seed"]
    marks = Marks(order.get("stop_at"))
    envs = environments(recipe)
    rows = recipe["num_envs"] * recipe["num_steps"]
    model = trpo(recipe, envs, seed) if "trpo_kl" in recipe else ppo(recipe, envs, seed)
    model.learn(order["total_steps"] // rows * rows, callback=marks)
    marks.note()
    packages = ("stable-baselines3", "torch", "gymnasium", "numpy")
    return {"marks": marks.rows, "versions": {name: version(name) for name in packages}}


def ppo(recipe: Mapping[str, Any], envs: Any, seed: int) -> Any:
    """PPO with a recipe's settings."""
    rows = recipe["num_envs"] * recipe["num_steps"]
    is_atari = "options" in recipe
    return PPO(
        "CnnPolicy" if is_atari else "MlpPolicy",
        envs,
        learning_rate=lambda remaining: remaining * recipe["learning_rate"],
        n_steps=recipe["num_steps"],
        batch_size=rows // recipe["num_minibatches"],
        n_epochs=recipe["num_epochs"],
        gamma=recipe["gamma"],
        gae_lambda=recipe["gae_lambda"],
        clip_range=recipe["clip_range"],
        ent_coef=recipe["entropy_coef"],
        vf_coef=recipe.get("value_coef", 0.5) / 2,  # of the squared error; kedge's is of half of it
        max_grad_norm=recipe["max_grad_norm"],
        target_kl=recipe["early_stop_kl"],
        stats_window_size=WINDOW,
        policy_kwargs={**({} if is_atari else NETWORKS), "optimizer_kwargs": {"eps": 1e-5}},
        seed=seed,
        device="cpu",
    )


def trpo(recipe: Mapping[str, Any], envs: Any, seed: int) -> Any:
    """TRPO with a recipe's settings; the library averages the KL over the numbers of an action, which is their sum."""
    from sb3_contrib import TRPO

    return TRPO(
        "MlpPolicy",
        envs,
        learning_rate=recipe["learning_rate"],
        n_steps=recipe["num_steps"],
        batch_size=recipe["num_envs"] * recipe["num_steps"] // recipe["num_minibatches"],
        n_critic_updates=recipe["num_epochs"],
        gamma=recipe["gamma"],
        gae_lambda=recipe["gae_lambda"],
        target_kl=recipe["trpo_kl"] / np.prod(envs.action_space.shape),
        cg_max_steps=recipe["trpo_iterations"],
        cg_damping=recipe["trpo_damping"],
        stats_window_size=WINDOW,
        policy_kwargs={**NETWORKS, "optimizer_kwargs": {"eps": 1e-5}},
        seed=seed,
        device="cpu",
    )


if __name__ == "__main__":
    found = main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    Path(sys.argv[2]).write_text(json.dumps(found), encoding="utf-8")
