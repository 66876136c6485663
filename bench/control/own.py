"""`python -m bench.control.own ORDER.json OUT.json`: one run of kedge."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kedge
from bench.control.recipes import QUIET, kedge_settings, recipe_of
from kedge_base.errors import NumericsError

train = kedge.control
"""Looked up beforehand: the package imports what a function needs when it is looked up."""

RETURN = "episode/return_mean"
WINDOW = 100
"""Episodes in the mean of which a return is reported, in every system."""


def main(order: Mapping[str, Any]) -> dict[str, Any]:
    """Run an order; returns its outcome.

    `marks` has a row per update: environment steps, CPU seconds, wall seconds, and the mean return of the latest 100
    episodes, None before that. `metrics` has the named metrics of every update.
    """
    recipe = recipe_of(order["recipe"])
    names = order.get("metrics", ())
    cpu = time.process_time()
    wall = time.perf_counter()
    marks: list[list[float | None]] = []
    kept: dict[str, list[float | None]] = {name: [] for name in names}
    episodes = 0

    def mark(update: Any) -> None:
        nonlocal episodes
        episodes += int(update.metrics.get("episode/count", 0))
        mean = update.metrics.get(RETURN) if episodes >= WINDOW else None
        spent = (time.process_time() - cpu, time.perf_counter() - wall)
        marks.append([update.number * recipe.steps_per_update, *spent, mean])
        for name in names:
            kept[name].append(update.metrics.get(name))
        if order.get("stop_at") is not None and mean is not None and mean >= order["stop_at"]:
            update.stop("the return was reached")

    settings = {
        **QUIET,
        **kedge_settings(recipe),
        **order.get("settings", {}),
        "control.total_steps": order["total_steps"],
        "runtime.seed": order["seed"],
    }
    failed = ""
    with tempfile.TemporaryDirectory() as folder:
        try:
            train(env=recipe.env, out=Path(folder) / "run", on_update=mark, **settings)
        except NumericsError as error:
            failed = str(error)
    packages = ("torch", "gymnasium", "numpy")
    return {"marks": marks, "metrics": kept, "versions": {name: version(name) for name in packages}, "failed": failed}


if __name__ == "__main__":
    assert os.environ.get("OMP_NUM_THREADS") == "1"
    found = main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    Path(sys.argv[2]).write_text(json.dumps(found), encoding="utf-8")
