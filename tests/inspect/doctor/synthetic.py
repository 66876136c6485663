"""A synthetic healthy run: the demo's metrics in round figures, with deterministic noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from kedge_inspect.doctor import RULES, Rule
from kedge_inspect.page.looks import look_of
from kedge_inspect.record import RunRecord

ALL_RULES = (*RULES, *look_of("control").rules)
BY_NAME = {rule.name: rule for rule in ALL_RULES}

Series = float | Callable[[float], float] | Sequence[float] | None
"""A constant, a function of the run's progress from 0 to 1, a value per update, or no metric at all."""


def wobble(update: int, salt: int) -> float:
    """Noise in [−1, 1] that depends on its arguments alone."""
    return math.sin(12.9898 * update + 78.233 * salt + update * update)


def towards(start: float, end: float, speed: float = 4.0) -> Callable[[float], float]:
    """From one value to another, most of the way early on."""
    return lambda done: end + (start - end) * math.exp(-speed * done)


HEALTHY: dict[str, Series] = {
    "reward/score_mean": towards(0.9, 2.2),
    "reward/score_std": towards(1.0, 0.5),
    "reward/total": towards(0.9, 2.0),
    "reward/kl": towards(0.0, 0.2),
    "reward/length_correlation": 0.2,
    "reward/unscored": 0.0,
    "score/model": towards(0.9, 2.2),
    "objective/kl": towards(0.0, 2.0),
    "objective/kl_coef": 0.1,
    "objective/logprobs": lambda done: -towards(0.23, 0.08)(done) * towards(20.6, 25.6)(done),
    "policy/approx_kl": towards(6e-3, 2e-5),
    "policy/clip_fraction": towards(0.04, 5e-4),
    "policy/entropy": towards(0.23, 0.08),
    "policy/grad_norm": 0.35,
    "policy/first_ratio_max": 1.0,
    "policy/sampler_ratio_max": 1.0,
    "policy/staleness": 0.0,
    "advantage/std": 0.4,
    "value/explained_variance": 0.3,
    "value/mean": towards(0.3, 2.1),
    "value/returns_mean": towards(0.7, 2.15),
    "value/std": 0.2,
    "value/returns_std": towards(1.0, 0.5),
    "value/clip_fraction": towards(0.6, 0.0),
    "value/loss": towards(0.85, 0.5),
    "response/length": towards(20.6, 25.6),
    "response/length_max": 40.0,
    "response/eos_rate": 1.0,
    "response/repetition": 0.02,
    "prompt/distinct": 1.0,
    "guard/skipped_steps": 0.0,
    "memory/process": 1.2,
    "time/reward": 0.2,
    "time/update": 2.0,
}

CONFIG: dict[str, Any] = {
    "reward": [{"source": "runs/reward/model", "weight": 1.0, "name": None}],
    "rollout": {"num_prompts": 128, "num_responses": 1, "max_new_tokens": 40, "temperature": 0.7,
                "missing_eos_score": "auto"},
    "ppo": {"learning_rate": 3e-4, "num_epochs": 2, "num_updates": 16, "kl_coef": 0.1, "kl_in": "reward",
            "kl_controller": "fixed", "critic": "shared", "value_unit": "returns_std", "value_clip_range": 0.2,
            "whiten_advantages": True, "whiten_rewards": False, "entropy_coef": 0.0, "schedule": "linear"},
}  # fmt: skip


def synthetic_run(
    updates: int = 16,
    metrics: Mapping[str, Series] | None = None,
    *,
    settings: Mapping[str, Any] | None = None,
    facts: Mapping[str, str] | None = None,
    **more: Any,
) -> RunRecord:
    """A healthy PPO run, except for the changes given.

    Args:
        updates: Number of updates.
        metrics: Metrics to replace; None removes one.
        settings: Configuration fields, by their dotted names.
        facts: Such as the precision.
        more: Further fields of the record.
    """
    return run_with(updates, {**HEALTHY, **(metrics or {})}, settings=settings, facts=facts, **more)


def run_with(
    updates: int,
    metrics: Mapping[str, Series],
    *,
    settings: Mapping[str, Any] | None = None,
    facts: Mapping[str, str] | None = None,
    **more: Any,
) -> RunRecord:
    """A run with these metrics alone."""
    config = {name: dict(section) if isinstance(section, dict) else section for name, section in CONFIG.items()}
    for dotted, value in (settings or {}).items():
        section, _, name = dotted.partition(".")
        if name:
            config.setdefault(section, {})[name] = value
        else:
            config[section] = value
    columns = {name: _column(series, updates, salt) for salt, (name, series) in enumerate(sorted(metrics.items()))
               if series is not None}  # fmt: skip
    rows = [
        {"update": update + 1, **{name: column[update] for name, column in columns.items()}}
        for update in range(updates)
    ]
    header = {"stage": "ppo", "precision": "fp32", **(facts or {})}
    return RunRecord(Path("run"), facts=header, config=config, metrics=rows, **more)


def metrics_read(rule: Rule, run: RunRecord) -> set[str]:
    """The metrics whose series a rule reads in a run."""
    names: set[str] = set()

    class Watched(RunRecord):
        def series(self, name: str) -> tuple[list[int], list[float]]:
            names.add(name)
            return super().series(name)

    rule.find(Watched(**{each.name: getattr(run, each.name) for each in fields(run)}))
    return names


def _column(series: float | Callable[[float], float] | Sequence[float], updates: int, salt: int) -> Sequence[float]:
    """A value per update. Constants and functions get one percent of noise, except where they are 0 or 1."""
    if isinstance(series, Sequence):
        return series
    curve = series if callable(series) else lambda done: float(series)
    clean = [curve(update / max(updates - 1, 1)) for update in range(updates)]
    return [value if value in (0.0, 1.0) else value * (1 + 0.01 * wobble(update, salt))
            for update, value in enumerate(clean)]  # fmt: skip
