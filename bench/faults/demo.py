"""The demo itself, as it ships: its own run is healthy, and the one without a KL penalty goes astray."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from bench.faults.running import Outcome, examine_run, run_apart
from kedge.demo.report import WITH_KL, WITHOUT_KL
from kedge.pipelines.demo import run_demo

__all__ = ["demo_outcomes"]

SEED: Final = 0
PARTS: Final = {
    "the demo: SFT": ("sft", ""),
    "the demo: reward model": ("reward", ""),
    "the demo: PPO": (WITH_KL, ""),
    "the demo: PPO without a KL penalty": (WITHOUT_KL, "proxy_up_judge_down"),
}
"""Of each of its runs, the folder, and the rule that has to find what is wrong with it."""


def demo_outcomes(work: Path, *, again: bool) -> list[Outcome]:
    """What the doctor says of the demo's four runs.

    Args:
        work: The folder that keeps runs.
        again: Run it anew.
    """
    folder = work / "runs" / f"demo-{SEED}"
    if again:
        run_apart(run_demo, folder, SEED, out=folder)
    return [examine_run(name, rule, SEED, folder / part, folder) for name, (part, rule) in PARTS.items()]
