"""Data and models as they should not be."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.faults import bugs
from bench.faults.base import QUIET, Base
from bench.faults.case import Rows
from kedge.pipelines.demo import demo_config
from kedge.pipelines.sft import run_sft

__all__ = ["few", "labels_by_chance", "longer_preferred", "taught_without_end"]


def few(count: int) -> Callable[[Rows], Rows]:
    """Only the first rows."""
    return lambda rows: rows[:count]


def labels_by_chance(comparisons: Rows) -> Rows:
    """Nobody has looked at what was compared."""
    rng = random.Random(0)
    return [_swapped(row) if rng.random() < 0.5 else row for row in comparisons]


def longer_preferred(comparisons: Rows) -> Rows:
    """The annotator takes the longer answer."""
    return [_swapped(row) if len(row["chosen"]) < len(row["rejected"]) else row for row in comparisons]


def taught_without_end(base: Base) -> Path:
    """The folder of an SFT policy that was trained where padding was EOS; it is made once."""
    folder = base.folder / "taught-without-end"
    if not folder.is_dir():
        config = demo_config("sft", base.start, folder, seed=base.seed, **QUIET)
        with bugs.end_masked():
            run_sft(config, demonstrations=base.demonstrations(3000))
    return folder / "model"


def _swapped(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "chosen": row["rejected"], "rejected": row["chosen"]}
