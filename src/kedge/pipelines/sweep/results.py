"""The results of a sweep: one number per run, and its mean over seeds with an interval."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from kedge.algorithm.statistics import Interval
from kedge.errors import ConfigError
from kedge.logs.metrics import METRICS_FILE, read_metrics
from kedge.pipelines.sweep.grid import Trial

__all__ = ["Goal", "Row", "choose_goal", "final_value", "mean_interval", "summarize"]

DEFAULT_METRICS = {
    "sft": ("eval/loss", "loss"),
    "reward": ("eval/accuracy", "accuracy"),
    "ppo": ("eval/score", "reward/score_mean"),
}
LOWER_IS_BETTER = ("loss", "kl", "clip_fraction", "error", "perplexity")

LAST_SHARE = 0.1
"""Share of a run's rows, at its end, that its result is the mean of: single updates are noisy."""

# The 97.5 % quantiles of Student's t distribution with 1 to 30 degrees of freedom.
T_QUANTILES = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
NORMAL_QUANTILE = 1.960


@dataclass(frozen=True)
class Goal:
    """What the runs are compared by.

    Attributes:
        metric: A metric of `metrics.jsonl`.
        higher_is_better: Whether the best run has the highest value.
    """

    metric: str
    higher_is_better: bool

    def sort_key(self, value: float) -> float:
        """A key that sorts the best value first."""
        return -value if self.higher_is_better else value


@dataclass(frozen=True)
class Row:
    """The result of one setting.

    Attributes:
        label: The setting.
        values: The results of the seeds that have one.
        interval: Their mean with its 95 % interval; the ends are NaN with one seed; None without a result.
        kl: The mean KL to the reference, for PPO.
    """

    label: str
    values: Sequence[float]
    interval: Interval | None
    kl: float | None


def choose_goal(stage: str, rows: Sequence[Mapping[str, Any]], metric: str | None, goal: str | None) -> Goal:
    """The metric of the comparison: the given one, or the stage's first that the rows have.

    Args:
        stage: The stage.
        rows: Rows of `metrics.jsonl`.
        metric: A metric, or None.
        goal: `max`, `min`, or None to go by the metric's name.

    Raises:
        ConfigError: The rows have no such metric.
    """
    known = sorted({name for row in rows for name in row} - {"update"})
    chosen = metric or next((name for name in DEFAULT_METRICS[stage] if name in known), "")
    if chosen not in known:
        raise ConfigError(f"--metric: the runs have no {chosen or 'result'}; they have {', '.join(known) or 'nothing'}")
    lower = goal == "min" if goal else any(word in chosen.rpartition("/")[2] for word in LOWER_IS_BETTER)
    return Goal(chosen, higher_is_better=not lower)


def final_value(rows: Sequence[Mapping[str, Any]], metric: str) -> float | None:
    """The mean of a metric over the last tenth of the rows that have it; None if none has."""
    values = [float(row[metric]) for row in rows if isinstance(row.get(metric), (int, float))]
    return mean(values[-math.ceil(LAST_SHARE * len(values)) :]) if values else None


def mean_interval(values: Sequence[float]) -> Interval:
    """The mean of independent values with Student's 95 % interval: x̄ ± t·s/√n; NaN ends for a single value."""
    if len(values) == 1:
        return Interval(values[0], math.nan, math.nan)
    degrees = len(values) - 1
    quantile = T_QUANTILES[degrees - 1] if degrees <= len(T_QUANTILES) else NORMAL_QUANTILE
    half = quantile * stdev(values) / math.sqrt(len(values))
    return Interval(mean(values), mean(values) - half, mean(values) + half)


def summarize(trials: Sequence[Trial], folder: Path, goal: Goal) -> list[Row]:
    """One row per setting, the best first; settings without a result last."""
    labels = list(dict.fromkeys(trial.label for trial in trials))
    rows = [_row(label, [trial for trial in trials if trial.label == label], folder, goal) for label in labels]
    return sorted(rows, key=lambda row: goal.sort_key(row.interval.value) if row.interval else math.inf)


def _row(label: str, trials: Sequence[Trial], folder: Path, goal: Goal) -> Row:
    metrics = [read_rows(folder / trial.name) for trial in trials]
    values = [value for rows in metrics if (value := final_value(rows, goal.metric)) is not None]
    kls = [value for rows in metrics if (value := final_value(rows, "objective/kl")) is not None]
    return Row(label, values, mean_interval(values) if values else None, mean(kls) if kls else None)


def read_rows(run: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics; none if it has not begun."""
    return read_metrics(run) if (run / METRICS_FILE).is_file() else []
