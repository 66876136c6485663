"""Fine-tuning and reward models: divergence, overfitting, and what a reward model has learned."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import Any

from kedge.inspect.doctor.finding import Remedy, Rule, Symptom
from kedge.inspect.doctor.needs import Needs
from kedge.inspect.doctor.remedies import scale
from kedge.inspect.doctor.trends import MIN_LEVEL, MIN_TREND, SIGNIFICANT, fmt, read
from kedge.inspect.record import RunRecord

__all__ = ["LOSS_RISING", "OVERFITTING", "REWARD_MODEL_AT_CHANCE", "REWARD_MODEL_BARELY_BETTER_THAN_LENGTH"]

OVERFITTED, BADLY_OVERFITTED = 0.03, 0.15
"""Relative rise of the held-out loss above its minimum. It is measured five times in a run on the same rows, so little
of it is noise. The demo's rises by 0.4 % at most."""

RISEN = 0.2
"""Relative rise of the training loss above the first batch's: batches differ by less."""

BARELY = 0.03
"""Accuracy above that of always preferring the longer response. Published reward models have 5 to 10 points (Stiennon:
0.63 to 0.69 against about 0.6)."""

CHANCE, PUBLISHED = 0.55, 0.63
"""Accuracy close to a coin flip, and the lowest of published reward models."""

INDIFFERENT = math.log(2.0)
"""Loss of equal scores for all answers, nats per pair: −log σ(0)."""

SUPERVISED = ("sft", "reward", "critic")


def _section(run: RunRecord) -> str:
    marks = {"accuracy": "reward_model", "explained_variance": "critic"}
    return next((section for mark, section in marks.items() if mark in run.metrics[-1]), "sft")


def _overfitting(run: RunRecord) -> Symptom | None:
    held_out = read(run, "eval/loss", at_least=3)
    if held_out is None:
        return None
    best, last = min(held_out.values), held_out.values[-1]
    if last <= best * (1 + OVERFITTED):
        return None
    return Symptom(
        "serious" if last > best * (1 + BADLY_OVERFITTED) else "warning",
        f"the held-out loss rises from {fmt(best)} at step {held_out.updates[held_out.values.index(best)]} to "
        f"{fmt(last)} at step {held_out.updates[-1]}",
        tuple(_train_less(run)),
        "train on more data",
    )


def _train_less(run: RunRecord) -> Iterator[Remedy]:
    section = _section(run)
    if run.setting(f"{section}.num_epochs") != 1:
        yield scale(run, f"{section}.num_epochs", 0.5)
    yield scale(run, f"{section}.learning_rate", 1 / 3)


def _loss_rising(run: RunRecord) -> Symptom | None:
    loss = read(run, "loss", at_least=2 * MIN_TREND)
    if loss is None or loss.late - loss.first <= max(RISEN * loss.first, SIGNIFICANT * loss.rise_error):
        return None
    return Symptom(
        "serious",
        f"the training loss rises from {fmt(loss.first)} to {fmt(loss.late)} ({loss.late_span})",
        (scale(run, f"{_section(run)}.learning_rate", 0.1), scale(run, f"{_section(run)}.warmup_fraction", 2.0)),
    )


def _accuracy(run: RunRecord) -> Mapping[str, Any] | None:
    accuracy = run.summary.get("accuracy")
    return accuracy if isinstance(accuracy, Mapping) else None


CHECK_LABELS = "check that `chosen` is the better response and that the annotators agree with each other"


def _at_chance(run: RunRecord) -> Symptom | None:
    accuracy = _accuracy(run)
    if accuracy is None:
        return _at_chance_in_training(run)
    if accuracy["value"] > CHANCE:
        return None
    if accuracy["high"] >= PUBLISHED:
        hold_out = scale(run, "data.eval_fraction", 3.0)
        return Symptom("warning", _written(run, accuracy), (hold_out, *_learn_more(run)), CHECK_LABELS)
    return Symptom("serious", _written(run, accuracy), _learn_more(run), CHECK_LABELS)


def _at_chance_in_training(run: RunRecord) -> Symptom | None:
    """The same with nothing held out: on its training pairs a model does better than on others, not worse."""
    accuracy, loss = read(run, "accuracy"), read(run, "loss")
    if accuracy is None or loss is None:
        return None
    share, worse = fmean(accuracy.values[-accuracy.window :]), loss.late >= INDIFFERENT
    if share > CHANCE and not worse:
        return None
    pairs = accuracy.window * (run.setting("reward_model.batch_size") or 1)
    error = 2 * math.sqrt(max(0.0, share * (1 - share)) / pairs)
    return Symptom(
        "serious" if share <= CHANCE and share + error < PUBLISHED else "warning",
        f"accuracy on the training pairs is {share:.1%} (± {error:.0%}) and the loss {loss.late:.3f} "
        f"({loss.late_span}), where equal scores for all answers have {INDIFFERENT:.3f}; nothing was held out",
        _learn_more(run) if share <= CHANCE else (scale(run, "reward_model.learning_rate", 1 / 3),),
        CHECK_LABELS if share <= CHANCE else "",
    )


def _nothing_to_judge_by(run: RunRecord) -> str:
    if _accuracy(run) is not None or (read(run, "accuracy") and read(run, "loss")):
        return ""
    return f"nothing was held out, and the run has fewer than {MIN_LEVEL} steps"


def _learn_more(run: RunRecord) -> tuple[Remedy, ...]:
    return scale(run, "reward_model.learning_rate", 3.0), scale(run, "reward_model.num_epochs", 2.0)


def _not_held_out(run: RunRecord) -> str:
    if _accuracy(run) is not None:
        return ""
    if not run.summary:
        return "held-out accuracy is measured at the end"
    return "nothing was held out (data.eval_fraction)"


def _barely_better(run: RunRecord) -> Symptom | None:
    accuracy, by_length = _accuracy(run), run.summary.get("length_accuracy")
    if accuracy is None or not isinstance(by_length, Mapping) or accuracy["value"] - by_length["value"] >= BARELY:
        return None
    return Symptom(
        "serious" if accuracy["value"] + _error(accuracy, by_length) < by_length["value"] else "warning",
        f"{_written(run, accuracy)}; always preferring the longer response gets {by_length['value']:.1%}",
        (scale(run, "data.eval_fraction", 3.0),),
        "train on pairs of similar length, or add a length penalty to the reward; a larger held-out set narrows the "
        "interval",
    )


def _error(accuracy: Mapping[str, Any], by_length: Mapping[str, Any]) -> float:
    """Half the width of the interval of their difference, as if they were independent, which is on the safe side."""
    below = by_length["value"] - by_length.get("low", by_length["value"])
    return math.hypot(accuracy["high"] - accuracy["value"], below)


def _written(run: RunRecord, accuracy: Mapping[str, Any]) -> str:
    pairs = run.summary.get("num_pairs")
    return (
        f"held-out accuracy is {accuracy['value']:.1%} ({accuracy['low']:.0%} to {accuracy['high']:.0%}) on "
        f"{pairs} pair{'' if pairs == 1 else 's'}"
    )


LOSS_RISING = Rule(
    "loss_rising",
    "Training makes the model worse on its own training data: the steps are too large.",
    ("loss",),
    _loss_rising,
    Needs(("loss",), 2 * MIN_TREND, SUPERVISED),
)

REWARD_MODEL_AT_CHANCE = Rule(
    "reward_model_at_chance",
    "The reward model cannot tell good responses from bad ones. PPO would optimize an arbitrary preference.",
    ("accuracy", "loss"),
    _at_chance,
    Needs(stages=("reward",), lacks=_nothing_to_judge_by),
)

REWARD_MODEL_BARELY_BETTER_THAN_LENGTH = Rule(
    "reward_model_barely_better_than_length",
    "The reward model may have learned little more than that longer is better, and a policy will exploit that.",
    (),
    _barely_better,
    Needs(stages=("reward",), lacks=_not_held_out),
)

OVERFITTING = Rule(
    "overfitting",
    "The model memorizes its training data: the held-out loss is rising again while training continues.",
    ("eval/loss",),
    _overfitting,
    Needs(("eval/loss",), 3, SUPERVISED),
)
