"""Fine-tuning and reward models: what was learnt, and what was only learnt by heart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kedge.inspect.doctor.courses import CERTAIN, TREND, course, figure
from kedge.inspect.doctor.finding import Rule, Symptom
from kedge.inspect.doctor.remedies import scale
from kedge.inspect.record import RunRecord

__all__ = ["LOSS_RISING", "OVERFITTING", "REWARD_MODEL_AT_CHANCE", "REWARD_MODEL_BARELY_BETTER_THAN_LENGTH"]

OVERFITTED, BADLY_OVERFITTED = 0.03, 0.15
"""Rise of the held-out loss above its best, in that best: it is measured five times in a run, on the same rows each
time, so that little of this is noise. The demo's rises by 0.4 % at most."""

RISEN = 0.2
"""Rise of the training loss above that of the first batch, in that: batches differ by less."""

BARELY = 0.03
"""Accuracy beyond that of taking the longer answer. Published reward models have 5 to 10 points (Stiennon: 0.63 to 0.69
against about 0.6)."""

CHANCE = 0.55
"""Held-out accuracy next to a coin's; published ones begin at 0.63."""


def _section(run: RunRecord) -> str:
    return "reward_model" if "accuracy" in run.metrics[-1] else "sft"


def _overfitting(run: RunRecord) -> Symptom | None:
    held_out = course(run, "eval/loss", least=3)
    if held_out is None:
        return None
    best, last = min(held_out.figures), held_out.figures[-1]
    if last <= best * (1 + OVERFITTED):
        return None
    section = _section(run)
    return Symptom(
        "serious" if last > best * (1 + BADLY_OVERFITTED) else "warning",
        f"the held-out loss is {figure(best)} at step {held_out.updates[held_out.figures.index(best)]} and "
        f"{figure(last)} at step {held_out.updates[-1]}",
        (scale(run, f"{section}.num_epochs", 0.5), scale(run, f"{section}.learning_rate", 1 / 3)),
        "take more data, or none of them twice",
    )


def _loss_rising(run: RunRecord) -> Symptom | None:
    loss = course(run, "loss", least=2 * TREND)
    if loss is None or loss.late - loss.first <= max(RISEN * loss.first, CERTAIN * loss.error):
        return None
    return Symptom(
        "serious",
        f"the training loss rises from {figure(loss.first)} to {figure(loss.late)} ({loss.late_span})",
        (scale(run, f"{_section(run)}.learning_rate", 0.1), scale(run, f"{_section(run)}.warmup_fraction", 2.0)),
    )


def _accuracy(run: RunRecord) -> Mapping[str, Any] | None:
    found = run.summary.get("accuracy")
    return found if isinstance(found, Mapping) else None


def _at_chance(run: RunRecord) -> Symptom | None:
    accuracy = _accuracy(run)
    if accuracy is None or accuracy["value"] > CHANCE:
        return None
    return Symptom(
        "serious",
        f"{_rated(accuracy)} of {run.summary.get('num_pairs')} held-out pairs are in the right order",
        (scale(run, "reward_model.learning_rate", 3.0), scale(run, "reward_model.num_epochs", 2.0)),
        "see that `chosen` is the better answer, and that annotators agree",
    )


def _barely_better(run: RunRecord) -> Symptom | None:
    accuracy, by_length = _accuracy(run), run.summary.get("length_accuracy")
    if accuracy is None or not isinstance(by_length, Mapping) or accuracy["value"] - by_length["value"] >= BARELY:
        return None
    return Symptom(
        "serious" if accuracy["high"] < by_length["value"] else "warning",
        f"{_rated(accuracy)} of {run.summary.get('num_pairs')} held-out pairs are in the right order; taking the "
        f"longer answer gets {by_length['value']:.1%}",
        (scale(run, "data.eval_fraction", 3.0),),
        "take pairs of about equal length, or a term for length into the reward; a larger held-out part tells more",
    )


def _rated(accuracy: Mapping[str, Any]) -> str:
    return f"{accuracy['value']:.1%} ({accuracy['low']:.0%} to {accuracy['high']:.0%})"


LOSS_RISING = Rule(
    "loss_rising",
    "Training makes the model worse at what it is trained on: the steps are too large.",
    ("loss",),
    _loss_rising,
)

REWARD_MODEL_AT_CHANCE = Rule(
    "reward_model_at_chance",
    "The reward model does not know good from bad, and PPO will learn whatever it likes instead.",
    (),
    _at_chance,
)

REWARD_MODEL_BARELY_BETTER_THAN_LENGTH = Rule(
    "reward_model_barely_better_than_length",
    "The reward model may have learnt that long is good, and no more. A policy will.",
    (),
    _barely_better,
)

OVERFITTING = Rule(
    "overfitting",
    "The model learns its rows by heart: the training loss falls on, and on rows that it has not seen it gets worse.",
    ("eval/loss",),
    _overfitting,
)
