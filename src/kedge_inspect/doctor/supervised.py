"""Fine-tuning, reward models and critics: divergence, overfitting, and learning too little."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import Any

from kedge_base.texts import counted
from kedge_inspect.doctor.rule import LARGEST_SHARE, Remedy, Symptom, rule, scale, set_to
from kedge_inspect.doctor.series import MIN_LEVEL, MIN_TREND, SIGNIFICANT, WINDOW, Series, fmt, read, span
from kedge_inspect.doctor.steps import gradient_spikes, section_of
from kedge_inspect.record import RunRecord

OVERFITTED = 0.03
BADLY_OVERFITTED = 0.15
"""Relative rise of the held-out loss above its minimum. It is measured five times in a run on the same rows, so little
of it is noise. The demo's rises by 0.4% at most."""

RISEN = 0.2
"""Relative rise of the training loss above the first batch's: batches differ by less."""

DIVERGED = 2.0
LEAST_LOSS = 0.1
PEAK_OF_NOISE = 6.0
"""Multiple of the first batch's loss, or of 0.1 nats if that is more, that no healthy run reaches in three consecutive
steps; and how many standard errors that is above the first batch, since a long run of small batches has lucky ones."""

BARELY = 0.03
"""Accuracy above that of always preferring the longer response. Published reward models have 5 to 10 points (Stiennon:
0.63 to 0.69 against about 0.6)."""

CHANCE = 0.55
PUBLISHED = 0.63
"""Accuracy close to a coin flip, and the lowest of published reward models."""

INDIFFERENT = math.log(2.0)
"""Loss of equal scores for all answers, nats per pair: −log σ(0)."""

SUPERVISED = ("sft", "reward", "critic")


@rule(
    "The model memorizes its training data: the held-out loss is rising again while training continues.",
    needs=("eval/loss",),
    updates=3,
    stages=SUPERVISED,
)
def overfitting(run: RunRecord, held_out: Series) -> Symptom | None:
    """Seen: `eval/loss` rises again.

    Try: Train on more data; halve the epochs; lower the learning rate to a third.

    Threshold: 3% above its minimum is a warning, 15% serious. The demo's rises by 0.4% at most.
    """
    best = min(held_out.values)
    last = held_out.values[-1]
    if last <= best * (1 + OVERFITTED):
        return None
    return Symptom(
        "serious" if last > best * (1 + BADLY_OVERFITTED) else "warning",
        f"the held-out loss rises from {fmt(best)} at step {held_out.updates[held_out.values.index(best)]} to "
        f"{fmt(last)} at step {held_out.updates[-1]}",
        _train_less(run),
        "train on more data",
    )


def _train_less(run: RunRecord) -> Iterator[Remedy]:
    section = section_of(run)
    if run.setting(f"{section}.num_epochs") != 1:
        yield scale(f"{section}.num_epochs", 0.5)
    yield scale(f"{section}.learning_rate", 1 / 3)


@rule(
    "Training makes the model worse on its own training data: the steps are too large.",
    needs=("loss",),
    updates=2 * MIN_TREND,
    stages=SUPERVISED,
)
def loss_rising(run: RunRecord, loss: Series) -> Symptom | None:
    """Seen: `loss` rises.

    Try: Lower the learning rate to a tenth; double the warm-up, or start with one.

    Threshold: 20% of the first batch's and three standard errors above that, or above the first three; batches differ
    by less. Or twice the first batch's in three consecutive steps, and six standard errors above it, even if it falls
    again. Serious.
    """
    moves = [loss.since(count) for count in (1, WINDOW)]
    beyond_noise = loss.peak - loss.first > PEAK_OF_NOISE * moves[0][1]
    if beyond_noise and loss.peak > DIVERGED * max(loss.first, LEAST_LOSS):
        to = f"{fmt(loss.peak)} ({span(loss.peak_updates)})"
    elif any(move > max(RISEN * loss.first, SIGNIFICANT * error) for move, error in moves):
        to = f"{fmt(loss.late)} ({loss.late_span})"
    else:
        return None
    return Symptom(
        "serious",
        f"the training loss rises from {fmt(loss.first)} to {to}",
        (scale(f"{section_of(run)}.learning_rate", 0.1), _longer_rise(run)),
    )


def _longer_rise(run: RunRecord) -> Remedy:
    """Double the share of the steps in which the learning rate rises."""
    schedule = run.setting(f"{section_of(run)}.schedule") or "cosine"
    [(decay, fraction)] = schedule.items() if isinstance(schedule, dict) else [(schedule, 0.05)]
    return set_to(f"{section_of(run)}.schedule", {decay: min(2 * fraction, LARGEST_SHARE)}, "too_low")


HOLD_OUT_MORE = scale("data.eval_fraction", 3.0)
CHECK_LABELS = "check that `chosen` is the better response and that the annotators agree with each other"


def _learn_more(run: RunRecord) -> Iterator[Remedy]:
    """Suggest a different learning rate and more epochs, unless the model has memorized its training data."""
    if overfitting.find(run) is None:
        yield _other_rate(run)
        yield scale("reward_model.num_epochs", 2.0)


def _other_rate(run: RunRecord) -> Remedy:
    """Triple the learning rate, or cut it to a third if training shows that its steps are too large."""
    loss = read(run, "loss")
    # With margins, equal scores have a higher loss than INDIFFERENT, namely the first batch's.
    is_worse = run.stage == "reward" and loss is not None and loss.late > (1 + RISEN) * max(INDIFFERENT, loss.first)
    spikes = gradient_spikes.find(run)
    are_too_large = is_worse or loss_rising.find(run) is not None or (spikes is not None and spikes.severity != "note")
    return scale(f"{section_of(run)}.learning_rate", 1 / 3 if are_too_large else 3.0)


def _nothing_to_judge_by(run: RunRecord) -> str:
    if run.summary.get("accuracy") or (read(run, "accuracy") and read(run, "loss")):
        return ""
    return f"nothing was held out, and the run has fewer than {MIN_LEVEL} steps"


def _at_chance_in_training(run: RunRecord) -> Symptom | None:
    """Judge by training pairs if nothing was held out: a model is not better on other pairs."""
    accuracy = read(run, "accuracy")
    loss = read(run, "loss")
    if accuracy is None or loss is None:
        return None
    share = fmean(accuracy.values[-accuracy.window :])
    worse = loss.late >= INDIFFERENT
    if share > CHANCE and not worse:
        return None
    other = read(run, "eval/accuracy", at_least=1)
    held_out = f"; on held-out pairs accuracy is {other.values[-1]:.1%}" if other else "; nothing was held out"
    pairs = accuracy.window * (run.setting("reward_model.batch_size") or 1)
    error = 2 * math.sqrt(max(0.0, share * (1 - share)) / pairs)
    return Symptom(
        "serious" if share <= CHANCE and share + error < PUBLISHED else "warning",
        f"accuracy on the training pairs is {share:.1%} (± {error:.0%}) and the loss {loss.late:.3f} "
        f"({loss.late_span}), where equal scores for all answers have {INDIFFERENT:.3f}{held_out}",
        _learn_more(run) if share <= CHANCE else (scale("reward_model.learning_rate", 1 / 3),),
        CHECK_LABELS if share <= CHANCE else "",
    )


@rule(
    "The reward model cannot tell good responses from bad ones. PPO would optimize an arbitrary preference.",
    figures=("accuracy",),
    early=_at_chance_in_training,
    stages=("reward",),
    lacks=_nothing_to_judge_by,
)
def reward_model_at_chance(run: RunRecord, accuracy: Mapping[str, Any]) -> Symptom | None:
    """Seen: The held-out accuracy in `summary.json` is close to a coin flip. With nothing held out: the late training
    `accuracy` is, or the training `loss` is not below ln 2, the loss of equal scores for all answers.

    Try: Check that `chosen` is the better response and that the annotators agree with each other; triple
    `reward_model.learning_rate`, or lower it to a third if the training `loss` rises or ends more than a fifth above
    both ln 2 and the first batch's, or gradients spike more than once in a hundred steps; double
    `reward_model.num_epochs`. Neither with [overfitting](#overfitting).

    Threshold: 0.55; published reward models start at 0.63. Serious; a warning if the held-out pairs are few and the
    interval reaches 0.63. With nothing held out it is a warning if the late steps have few pairs and 0.63 is within two
    standard errors, or if only the loss is too high.
    """
    if accuracy["value"] > CHANCE:
        return None
    is_uncertain = accuracy["high"] >= PUBLISHED
    remedies = (*([HOLD_OUT_MORE] if is_uncertain else []), *_learn_more(run))
    return Symptom("warning" if is_uncertain else "serious", _written(run, accuracy), remedies, CHECK_LABELS)


def _not_held_out(run: RunRecord) -> str:
    if run.summary.get("accuracy"):
        return ""
    if not run.summary:
        return "there is no held-out accuracy so far (kedge measures it at the end)"
    return "nothing was held out (data.eval_fraction)"


@rule(
    "The reward model may have learned little more than that longer is better, and a policy will exploit that.",
    figures=("accuracy", "length_accuracy"),
    stages=("reward",),
    lacks=_not_held_out,
)
def reward_model_barely_better_than_length(
    run: RunRecord, accuracy: Mapping[str, Any], by_length: Mapping[str, Any]
) -> Symptom | None:
    """Seen: The held-out accuracy is close to that of always preferring the longer response.

    Try: Train on pairs of similar length, or add a length penalty to the reward; triple `data.eval_fraction` for a
    narrower interval.

    Threshold: Less than 3 points above the length baseline is a warning; published reward models have 5 to 10. Serious
    if it is below the baseline by more than the error of their difference.
    """
    if accuracy["value"] - by_length["value"] >= BARELY:
        return None
    return Symptom(
        "serious" if accuracy["value"] + _error(accuracy, by_length) < by_length["value"] else "warning",
        f"{_written(run, accuracy)}; always preferring the longer response gets {by_length['value']:.1%}",
        (HOLD_OUT_MORE,),
        "train on pairs of similar length, or add a length penalty to the reward; a larger held-out set narrows the "
        "interval",
    )


def _error(accuracy: Mapping[str, Any], by_length: Mapping[str, Any]) -> float:
    """Return half the width of the difference's interval, assuming independence, which is conservative."""
    below = by_length["value"] - by_length.get("low", by_length["value"])
    return math.hypot(accuracy["high"] - accuracy["value"], below)


def _written(run: RunRecord, accuracy: Mapping[str, Any]) -> str:
    return (
        f"held-out accuracy is {accuracy['value']:.1%} ({accuracy['low']:.0%} to {accuracy['high']:.0%}) on "
        f"{counted(run.summary.get('num_pairs', 0), 'pair')}"
    )


LITTLE = 0.05
"""Explained variance of a critic that hardly helps PPO: advantages vary as much as without a critic."""


def _unmeasured(run: RunRecord) -> str:
    if not run.summary:
        return "the critic is measured at the end"
    return "" if run.summary.get("measured_on") == "held-out prompts" else "nothing was held out (data.eval_fraction)"


@rule(
    "PPO would start from values that tell good responses from bad ones hardly better than their mean: too few "
    "responses to learn from, steps too small, or returns that nothing in a prompt and its prefix foretells.",
    figures=("explained_variance",),
    stages=("critic",),
    lacks=_unmeasured,
)
def critic_explains_nothing(run: RunRecord, explained: Mapping[str, Any]) -> Symptom | None:
    """Seen: In `summary.json` of `kedge critic`, the explained variance on held-out prompts is close to 0.

    Try: `critic.kind=separate`; double `critic.num_responses`; triple `critic.learning_rate`, or lower it to a third if
    the training `loss` rises or gradients spike more than once in a hundred steps, but neither with
    [overfitting](#overfitting).

    Threshold: 5%: with less, the advantages vary as they would without a critic. Serious; a warning if the interval
    reaches 5%.
    """
    if explained["value"] >= LITTLE:
        return None
    return Symptom(
        "serious" if explained["high"] < LITTLE else "warning",
        f"on held-out prompts the critic explains {explained['value']:.0%} of the variance of the returns "
        f"({explained['low']:.0%} to {explained['high']:.0%})",
        _learn_more_returns(run),
    )


def _learn_more_returns(run: RunRecord) -> Iterator[Remedy]:
    if run.setting("critic.kind") == "shared":
        yield set_to("critic.kind", "separate", why="to train more than a head")
    yield scale("critic.num_responses", 2.0)
    if run.setting("critic.kind") != "shared" and overfitting.find(run) is None:
        yield _other_rate(run)
