"""`kedge demo`: SFT, reward model and PPO on a tiny model, from scratch."""

from pathlib import Path
from typing import Annotated

import typer

from kedge.cli.options import Out
from kedge.runs.claim import claim_free_folder, claims
from kedge_base.run_folder.output import check_output
from kedge_lab.demo.recipe import DURATION

ABOUT = f"Train a tiny summarizer from scratch with SFT, reward model and PPO, and evaluate it: {DURATION}."


def demo(out: Out = None, seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0) -> None:
    """Run the demo."""
    with claims():
        folder = claim_free_folder(Path("runs") / "demo") if out is None else check_output(out)
        from kedge_lab.demo.main import run_demo

        run_demo(folder, seed)
