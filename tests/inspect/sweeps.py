"""Folders of sweeps, written by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.inspect.runs import add, begin, metrics

RATES = ("1e-5", "1e-4")


def write_sweep(
    folder: Path,
    scores: Mapping[tuple[str, int], Sequence[float]],
    *,
    finished: Sequence[tuple[str, int]] = (),
    failed: Mapping[tuple[str, int], str] | None = None,
    num_seeds: int = 2,
) -> Path:
    """A sweep over two learning rates.

    Args:
        folder: Its folder.
        scores: The score at each update so far, by rate and seed; a run without an entry has not begun.
        finished: The runs that have finished.
        failed: The last lines of the runs that failed.
        num_seeds: Seeds of each rate.
    """
    (folder / "logs").mkdir(parents=True)
    runs, failed = [(rate, seed) for rate in RATES for seed in range(num_seeds)], failed or {}
    for run in runs:
        if run in scores:
            begin(folder / name(*run))
            rows = [metrics(update, **{"reward/score_mean": score}) for update, score in enumerate(scores[run], 1)]
            add(folder / name(*run), "metrics.jsonl", *rows)
        if run in finished:
            (folder / name(*run) / "finished.json").write_text('{"updates": 40}', encoding="utf-8")
    described = [{"name": name(*run), "values": {"ppo.learning_rate": run[0]}, "seed": run[1]} for run in runs]
    content = {
        "stage": "ppo",
        "metric": None,
        "goal": None,
        "runs": described,
        "errors": {name(*run): error for run, error in failed.items()},
    }
    (folder / "sweep.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def name(rate: str, seed: int) -> str:
    return f"learning_rate={rate}_seed={seed}"
