"""The demo itself: its main run is healthy, and the one without a KL penalty over-optimizes."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from bench.faults.running import Outcome, examine_run, run_apart
from kedge_lab.demo.main import WITH_KL, WITHOUT_KL, run_demo

SEED: Final = 0
PARTS: Final = {
    "the demo: SFT": ("sft", ""),
    "the demo: reward model": ("reward", ""),
    "the demo: PPO": (WITH_KL, ""),
    "the demo: PPO without a KL penalty": (WITHOUT_KL, "proxy_up_judge_down"),
}
"""The folder of each of its runs, and the rule that should find the fault; empty for a healthy run."""


def demo_outcomes(work: Path, *, rerun: bool) -> list[Outcome]:
    """Diagnose the demo's four runs.

    Args:
        work: The folder of the runs.
        rerun: Run it first; otherwise the existing run is diagnosed.
    """
    folder = work / "runs" / f"demo-{SEED}"
    if rerun:
        run_apart(run_demo, folder, SEED, out=folder)
    return [examine_run(name, rule, SEED, folder / part, folder) for name, (part, rule) in PARTS.items()]
