"""A run that is well, made up: the demo's course in round figures, with noise that is the same each time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kedge.inspect.record import RunRecord

Series = float | Callable[[float], float] | Sequence[float] | None
"""One figure, a function of the run's progress from 0 to 1, a figure per update, or none at all."""


def wobble(update: int, salt: int) -> float:
    """Noise in [−1, 1] that depends on nothing but its arguments."""
    return math.sin(12.9898 * update + 78.233 * salt + update * update)


def towards(start: float, end: float, speed: float = 4.0) -> Callable[[float], float]:
    """From one figure to another, most of the way early on."""
    return lambda done: end + (start - end) * math.exp(-speed * done)


WELL: dict[str, Series] = {
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
    "value/explained_variance": 0.03,
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
            "whiten_advantages": True, "whiten_rewards": False, "entropy_coef": 0.0, "warmup_fraction": 0.0},
}  # fmt: skip


def made_up(
    updates: int = 16,
    figures: Mapping[str, Series] | None = None,
    *,
    settings: Mapping[str, Any] | None = None,
    facts: Mapping[str, str] | None = None,
    **more: Any,
) -> RunRecord:
    """A PPO run that is well, but for what is said.

    Args:
        updates: How many it has had.
        figures: Metrics that take others' places; None takes one out.
        settings: By their dotted names.
        facts: Such as the precision.
        more: Further fields of the record.
    """
    return bare(updates, {**WELL, **(figures or {})}, settings=settings, facts=facts, **more)


def bare(
    updates: int,
    figures: Mapping[str, Series],
    *,
    settings: Mapping[str, Any] | None = None,
    facts: Mapping[str, str] | None = None,
    **more: Any,
) -> RunRecord:
    """A run that has measured nothing but this."""
    config = {name: dict(section) if isinstance(section, dict) else section for name, section in CONFIG.items()}
    for dotted, value in (settings or {}).items():
        section, _, name = dotted.partition(".")
        if name:
            config.setdefault(section, {})[name] = value
        else:
            config[section] = value
    columns = {name: _column(series, updates, salt) for salt, (name, series) in enumerate(sorted(figures.items()))
               if series is not None}  # fmt: skip
    rows = [
        {"update": update + 1, **{name: column[update] for name, column in columns.items()}}
        for update in range(updates)
    ]
    told = {"stage": "ppo", "precision": "fp32", **(facts or {})}
    return RunRecord(Path("run"), facts=told, config=config, metrics=rows, **more)


def _column(series: float | Callable[[float], float] | Sequence[float], updates: int, salt: int) -> Sequence[float]:
    """A figure per update; constants and functions get one per cent of noise, where that leaves 0 and 1 alone."""
    if isinstance(series, Sequence):
        return series
    course = series if callable(series) else lambda done: float(series)
    clean = [course(update / max(updates - 1, 1)) for update in range(updates)]
    return [value if value in (0.0, 1.0) else value * (1 + 0.01 * wobble(update, salt))
            for update, value in enumerate(clean)]  # fmt: skip
