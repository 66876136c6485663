"""`python -m bench.control.alone ORDER.json OUT.json`: the environments without a policy, the limit of every system."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gymnasium

ACTIONS = 1024
"""Random actions, drawn beforehand."""


def main(order: Mapping[str, Any]) -> dict[str, Any]:
    """Step one copy with random actions; `marks` has a row per update's worth of steps."""
    env = gymnasium.make(order["recipe"]["env"])
    env.action_space.seed(order["seed"])
    actions = [env.action_space.sample() for _ in range(ACTIONS)]
    env.reset(seed=order["seed"])
    marks: list[list[float | None]] = []
    every = 2048
    cpu = time.process_time()
    wall = time.perf_counter()
    for step in range(1, order["total_steps"] + 1):
        _, _, terminated, truncated, _ = env.step(actions[step % ACTIONS])
        if terminated or truncated:
            env.reset()
        if step % every == 0:
            marks.append([step, time.process_time() - cpu, time.perf_counter() - wall, None])
    return {"marks": marks, "versions": {name: version(name) for name in ("gymnasium", "numpy")}}


if __name__ == "__main__":
    found = main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    Path(sys.argv[2]).write_text(json.dumps(found), encoding="utf-8")
