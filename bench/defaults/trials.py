"""One short run, and the figures that show whether its steps were too large."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench.defaults.starts import SETTINGS, Start
from bench.faults.running import run_apart
from kedge.config import config_from_settings
from kedge.stages.ppo import run_ppo
from kedge_base.run_folder.record_format import read_metrics

ADVANTAGES: Mapping[str, Any] = {"ppo.gae_lambda": 0.95}
"""Of every run: that of the recorded runs, which are compared with new ones."""
LATE = 3
"""Updates in the medians of the run's end."""


@dataclass(frozen=True)
class Trial:
    """The settings of a run, and its figures.

    Attributes:
        start: Name of the start.
        settings: The point of the grid, by dotted name.
        seed: The run's seed.
        figures: See `figures_of`.
    """

    start: str
    settings: Mapping[str, Any]
    seed: int
    figures: Mapping[str, float]

    @property
    def key(self) -> str:
        """The same for trials of the same run."""
        return json.dumps([self.start, dict(self.settings), self.seed], sort_keys=True)


def run_trial(start: Start, settings: Mapping[str, Any], seed: int, *, preset: str, updates: int, out: Path) -> Trial:
    """Train for a few updates in a separate process.

    Args:
        start: Model, prompts and reward.
        settings: The point of the grid.
        seed: The run's seed.
        preset: Its preset.
        updates: Length of the run.
        out: The run's folder; an earlier one is replaced.

    Raises:
        BenchError: The run failed.
    """
    common = {**SETTINGS, **ADVANTAGES, "model": str(start.model), "out": str(out), "ppo.num_updates": updates}
    run_apart(_run, start, {**common, **start.settings, **settings, "runtime.seed": seed, "preset": preset}, out=out)
    return Trial(start.name, dict(settings), seed, figures_of(read_metrics(out)))


def _run(start: Start, settings: dict[str, Any]) -> None:
    if isinstance(start.reward, str):
        settings = {**settings, "reward": start.reward}
    if isinstance(start.prompts, str):
        settings = {**settings, "data.prompts": start.prompts}
    run_ppo(
        config_from_settings("ppo", settings),
        prompts=None if isinstance(start.prompts, str) else start.prompts,
        reward=None if isinstance(start.reward, str) else start.reward,
    )


def figures_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The figures of a run.

    Args:
        rows: Its metrics.

    Returns:
        `clip_1`, `kl_1` and `ratio_1`: clip fraction, KL per token and largest ratio of the first update;
        `explained_2` and `explained`: explained variance in the second update and at the end; `bias`: distance of the
        mean value from the mean return at the end, in standard deviations of the returns; `gain`: rise of the mean
        score, in standard deviations of the first update's scores; `kl`: KL to the reference at the end, nats per
        response; `cost`: FLOPs of an update, in supervised fine-tuning steps on the same tokens, where they are known.
    """
    first = rows[0]
    second = rows[min(1, len(rows) - 1)]
    late = rows[-LATE:]

    def end(name: str) -> float:
        return median(row[name] for row in late)

    spread = first["reward/score_std"] or 1.0
    return {
        "clip_1": first["policy/clip_fraction"],
        "kl_1": first["policy/approx_kl"],
        "ratio_1": first["policy/ratio_max"],
        "explained_2": second["value/explained_variance"],
        "explained": end("value/explained_variance"),
        "bias": median(
            abs(row["value/returns_mean"] - row["value/mean"]) / (row["value/returns_std"] or 1.0) for row in late
        ),
        "gain": (end("reward/score_mean") - first["reward/score_mean"]) / spread,
        "kl": end("objective/kl"),
        **({"cost": end("cost/sft_steps")} if "cost/sft_steps" in first else {}),
    }


def read_trials(path: Path) -> list[Trial]:
    """The trials recorded so far; none if there is no file."""
    return [Trial(**row) for row in json.loads(path.read_text(encoding="utf-8"))] if path.is_file() else []


def save_trials(trials: list[Trial], path: Path) -> None:
    """Write the trials as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(trial) for trial in trials], indent=1) + "\n", encoding="utf-8")
