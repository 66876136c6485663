"""A score that rises for the wrong reason."""

from __future__ import annotations

from kedge.inspect.doctor.courses import CERTAIN, TREND, Course, course, fell, figure, rose
from kedge.inspect.doctor.finding import Remedy, Rule, Symptom
from kedge.inspect.doctor.remedies import scale
from kedge.inspect.doctor.responses import stop_is_asked_for
from kedge.inspect.record import RunRecord

__all__ = ["HACKING_BY_LENGTH", "HACKING_BY_NOT_STOPPING", "HACKING_BY_REPETITION", "PROXY_UP_JUDGE_DOWN"]

LONGER, MUCH_LONGER = 1.4, 1.75
"""Growth of the responses. The demo's grow by a quarter to a third, since those that leave something out are short."""

SHORTER = 0.5
"""The same downwards."""

CORRELATED = 0.5
"""Correlation of score and length at which length explains a quarter of the scores. Reward models of human preferences
have 0.3 to 0.5 (Singhal et al. 2023, arXiv 2310.03716)."""

REPETITIVE, VERY_REPETITIVE = 0.1, 0.2
"""Share of 4-grams that a response had before, above what it was at first. Natural short text has next to none."""

GIVEN_BACK = 0.25
"""Share of what a judge has gained at its best that it may lose again: its curve is flat there, and the highest of many
figures is high by chance, too."""

STOPS_LOST = 0.25
"""Fall of the share of responses that stop, while their score rises."""


def _score_rises(run: RunRecord) -> Course | None:
    score = course(run, "reward/score_mean", least=TREND)
    return score if rose(score) else None


def _pays(score: Course) -> str:
    return f"while the mean score rises from {figure(score.first)} to {figure(score.late)}"


def _leash(run: RunRecord) -> Remedy:
    """More of what holds the policy to the reference; there may be none at all."""
    return scale(run, "ppo.kl_coef", 3.0)


def _by_length(run: RunRecord) -> Symptom | None:
    score, length = _score_rises(run), course(run, "response/length", least=TREND)
    tie = course(run, "reward/length_correlation")
    if score is None or length is None or tie is None:
        return None
    growth = length.late / max(length.first, 1.0)
    strongest = max((tie.early, tie.late), key=abs)  # later on there may be no differences in length left
    longer = growth >= LONGER and rose(length) and strongest >= CORRELATED
    shorter = growth <= SHORTER and strongest <= -CORRELATED
    if not (longer or shorter):
        return None
    return Symptom(
        "serious" if growth >= MUCH_LONGER or shorter else "warning",
        f"responses go from {figure(length.first)} to {figure(length.late)} tokens ({length.late_span}), "
        f"{_pays(score)}; scores and lengths correlate by {figure(strongest)}",
        (_leash(run),),
        "pay for something else than length: take a length penalty into the reward, or a reward model that was "
        "trained on pairs of equal length",
    )


def _by_repetition(run: RunRecord) -> Symptom | None:
    score, repeated = _score_rises(run), course(run, "response/repetition", least=TREND)
    if score is None or repeated is None or not rose(repeated):
        return None
    more = repeated.late - repeated.first
    if more < REPETITIVE:
        return None
    return Symptom(
        "serious" if more >= VERY_REPETITIVE else "warning",
        f"{repeated.late:.0%} of a response's 4-grams occurred in it before ({repeated.late_span}), "
        f"{repeated.first:.0%} at first, {_pays(score)}",
        (_leash(run),),
        "take a penalty for repetition into the reward",
    )


def _by_not_stopping(run: RunRecord) -> Symptom | None:
    score, stops = _score_rises(run), course(run, "response/eos_rate", least=TREND)
    if score is None or stops is None or not fell(stops) or stops.first - stops.late < STOPS_LOST:
        return None
    tie = course(run, "reward/length_correlation")
    because_of_length = tie is not None and tie.early >= CORRELATED and not stop_is_asked_for(run)
    return Symptom(
        "warning" if because_of_length else "serious",
        f"{stops.late:.0%} of the responses stop ({stops.late_span}), {stops.first:.0%} at first, {_pays(score)}",
        (scale(run, "rollout.missing_eos_score", 1.0), _leash(run)),
        "let a response that does not stop score less than any that does",
    )


def _judge_down(run: RunRecord) -> Symptom | None:
    score = _score_rises(run)
    judges = (course(run, name, least=TREND) for name in run.judges)
    for name, judge in zip(run.judges, judges, strict=True):
        if score is None or judge is None or score.late < score.at(judge.peak_updates):
            continue
        lost = judge.peak - judge.late
        if lost <= max(CERTAIN * judge.error, GIVEN_BACK * (judge.peak - judge.first)):
            continue
        return Symptom(
            "serious" if fell(judge) else "warning",
            f"{name}, which judges and is not trained on, falls from {figure(judge.peak)} in {judge.peak_span} to "
            f"{figure(judge.late)} in {judge.late_span}, {_pays(score)}; it was {figure(judge.first)} at first",
            (_leash(run),),
            f"take the checkpoint of about update {judge.highest}",
        )
    return None


PROXY_UP_JUDGE_DOWN = Rule(
    "proxy_up_judge_down",
    "The reward is over-optimised: what it pays for and what is wanted have parted.",
    ("reward/score_mean", "score/NAME"),
    _judge_down,
)

HACKING_BY_LENGTH = Rule(
    "hacking_by_length",
    "The score follows the length of a response, and the policy has noticed.",
    ("reward/score_mean", "response/length", "reward/length_correlation"),
    _by_length,
)

HACKING_BY_REPETITION = Rule(
    "hacking_by_repetition",
    "Saying the same again pays, and the policy has noticed.",
    ("reward/score_mean", "response/repetition"),
    _by_repetition,
)

HACKING_BY_NOT_STOPPING = Rule(
    "hacking_by_not_stopping",
    "Responses that are cut off score better than those that end, and the policy has noticed.",
    ("reward/score_mean", "response/eos_rate", "reward/length_correlation"),
    _by_not_stopping,
)
