"""Faulty data and models."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.faults import bugs
from bench.faults.base import QUIET, Base
from bench.faults.case import Rows
from kedge.stages.sft import run_sft
from kedge_lab.demo.main import demo_config


def few(count: int) -> Callable[[Rows], Rows]:
    """Keep only the first rows."""
    return lambda rows: rows[:count]


def some_too_long(prompts: Rows) -> Rows:
    """A quarter of the prompts is longer than any model's context."""
    return [{**row, "text": row["text"] * 50} if number % 4 == 0 else row for number, row in enumerate(prompts)]


def random_labels(comparisons: Rows) -> Rows:
    """Half of the labels are swapped at random."""
    rng = random.Random(0)
    return [_swapped(row) if rng.random() < 0.5 else row for row in comparisons]


def longer_preferred(comparisons: Rows) -> Rows:
    """The longer response is always preferred."""
    return [_swapped(row) if len(row["chosen"]) < len(row["rejected"]) else row for row in comparisons]


def eos_masked_policy(base: Base) -> Path:
    """The folder of an SFT policy trained with EOS masked as padding; trained once."""
    folder = base.folder / "eos-masked"
    if not folder.is_dir():
        config = demo_config("sft", base.start, folder, seed=base.seed, **QUIET)
        with bugs.eos_masked():
            run_sft(config, demonstrations=base.demonstrations(3000))
    return folder / "model"


def _swapped(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "chosen": row["rejected"], "rejected": row["chosen"]}
