# pyright: reportMissingImports=false
"""`python cleanrl.py ORDER.json OUT.json`: one run of a script of CleanRL, from the folder that the order names.

The scripts are written for an older Gymnasium. Two of its names are replaced before a script runs unchanged: a wrapper
that has since got one more argument, and the one that records episodes; their returns are noted here; rewards that a
recipe scales are scaled after it.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
import torch.utils.tensorboard
import tyro

WINDOW = 100
RETURNS: deque[float] = deque(maxlen=WINDOW)

assert tyro  # imported before the clock starts, as torch is


class Reached(Exception):
    """The return was reached."""


class Recorded(gymnasium.wrappers.RecordEpisodeStatistics):
    """Notes the returns of episodes."""

    def step(self, action: Any) -> Any:
        """See Gymnasium."""
        found = super().step(action)
        if "episode" in found[4]:
            RETURNS.append(float(found[4]["episode"]["r"]))
        return found


class Writer:
    """Takes the place of TensorBoard's writer: a row per update, and nothing else."""

    rows: list[list[float | None]] = []  # noqa: RUF012 - the script makes the only one
    stop_at: float | None = None
    cpu = wall = 0.0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def add_scalar(self, name: str, value: Any, step: int) -> None:
        """Note the end of an update; its last entry is the speed."""
        if name != "charts/SPS":
            return
        mean = float(np.mean(RETURNS)) if len(RETURNS) >= WINDOW else None
        self.rows.append([step, time.process_time() - Writer.cpu, time.perf_counter() - Writer.wall, mean])
        if self.stop_at is not None and mean is not None and mean >= self.stop_at:
            raise Reached

    def add_text(self, *_: Any) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def main(order: Mapping[str, Any]) -> dict[str, Any]:
    """Run an order; the outcome is that of `bench.control.own`."""
    torch.set_num_threads(1)
    recipe = order["recipe"]
    original = gymnasium.wrappers.TransformObservation
    scales = partial(gymnasium.wrappers.NormalizeReward, gamma=recipe["gamma"])
    record = (lambda env: scales(Recorded(env))) if recipe.get("scales_rewards") else Recorded
    gymnasium.wrappers.RecordEpisodeStatistics = record
    gymnasium.wrappers.TransformObservation = lambda env, change: original(env, change, env.observation_space)
    torch.utils.tensorboard.SummaryWriter = Writer
    Writer.stop_at = order.get("stop_at")
    # The continuous script normalizes and the discrete one does not, without a switch in either.
    script = Path(order["folder"]) / ("ppo_continuous_action.py" if recipe["normalizes"] else "ppo.py")
    flags = {
        "env-id": recipe["env"],
        "seed": order["seed"],
        "total-timesteps": order["total_steps"],
        "num-envs": recipe["num_envs"],
        "num-steps": recipe["num_steps"],
        "update-epochs": recipe["num_epochs"],
        "num-minibatches": recipe["num_minibatches"],
        "learning-rate": recipe["learning_rate"],
        "gamma": recipe["gamma"],
        "gae-lambda": recipe["gae_lambda"],
        "clip-coef": recipe["clip_range"],
        "ent-coef": recipe["entropy_coef"],
        "max-grad-norm": recipe["max_grad_norm"],
    }
    if recipe["early_stop_kl"] is not None:
        flags["target-kl"] = 1.5 * recipe["early_stop_kl"]  # here the factor of the others is part of it
    pairs = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    sys.argv = [str(script), *pairs, "--no-clip-vloss", "--no-cuda"]
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - as long as the process lives
    Writer.cpu = time.process_time()
    Writer.wall = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        with suppress(Reached):
            runpy.run_path(str(script), run_name="__main__")
        os.chdir("/")
    packages = ("torch", "gymnasium", "numpy")
    return {"marks": Writer.rows, "versions": {name: version(name) for name in packages}}


if __name__ == "__main__":
    out = Path(sys.argv[2]).resolve()
    found = main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    out.write_text(json.dumps(found), encoding="utf-8")
