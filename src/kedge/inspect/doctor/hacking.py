"""Reward hacking: the score rises for the wrong reason."""

from __future__ import annotations

from kedge.inspect.doctor.checkpoints import earlier_policy
from kedge.inspect.doctor.finding import Remedy, Rule, Symptom
from kedge.inspect.doctor.needs import Needs
from kedge.inspect.doctor.remedies import adjust, scale
from kedge.inspect.doctor.responses import eos_is_scored
from kedge.inspect.doctor.trends import MIN_TREND, SIGNIFICANT, Series, fell, fmt, read, rose, span
from kedge.inspect.record import RunRecord

__all__ = ["HACKING_BY_LENGTH", "HACKING_BY_NOT_STOPPING", "HACKING_BY_REPETITION", "PROXY_UP_JUDGE_DOWN"]

LONGER, MUCH_LONGER = 1.4, 1.75
"""Growth of the responses. The demo's grow by a quarter to a third, since summaries that omit something are short."""

SHORTER = 0.5
"""The same downwards."""

CORRELATED = 0.5
"""Correlation of score and length at which length explains a quarter of the score. Reward models of human preferences
have 0.3 to 0.5 (Singhal et al. 2023, arXiv 2310.03716)."""

REPETITIVE, VERY_REPETITIVE = 0.1, 0.2
"""Rise in the share of repeated 4-grams. Natural short text has almost none."""

LOST_GAIN = 0.25
"""Share of a judge's best gain that it may lose again: its curve is flat near the top, and the highest of many noisy
figures is too high."""

HELD_OUT: dict[str, str] = dict.fromkeys(("eval/win_rate", "eval/score"), "measured on held-out prompts")
"""Metrics of the evaluations during a run that judge it as a judge does."""

FEWER_STOPS = 0.25
"""Fall in the share of responses that stop."""


def _rising_score(run: RunRecord) -> Series | None:
    score = read(run, "reward/score_mean", at_least=MIN_TREND)
    return score if rose(score) else None


def _while_score_rises(score: Series) -> str:
    return f"while the mean score rises from {fmt(score.first)} to {fmt(score.late)}"


def _stronger_kl(run: RunRecord) -> Remedy:
    return scale(run, "ppo.kl_coef", 3.0)


def _by_length(run: RunRecord) -> Symptom | None:
    score, length = _rising_score(run), read(run, "response/length", at_least=MIN_TREND)
    correlation = read(run, "reward/length_correlation")
    if score is None or length is None or correlation is None:
        return None
    growth = length.late / max(length.first, 1.0)
    strongest = max((correlation.early, correlation.late), key=abs)  # late lengths may all be the same
    longer = growth >= LONGER and rose(length) and strongest >= CORRELATED
    shorter = growth <= SHORTER and strongest <= -CORRELATED
    if not (longer or shorter):
        return None
    return Symptom(
        "serious" if growth >= MUCH_LONGER or shorter else "warning",
        f"responses go from {fmt(length.first)} to {fmt(length.late)} tokens ({length.late_span}) "
        f"{_while_score_rises(score)}; the correlation of score and length is {fmt(strongest)}",
        (_stronger_kl(run),),
        f"add a penalty for {'short' if shorter else 'long'} responses to the reward, or train the reward model on "
        "pairs of equal length",
    )


def _by_repetition(run: RunRecord) -> Symptom | None:
    score, repetition = _rising_score(run), read(run, "response/repetition", at_least=MIN_TREND)
    if score is None or repetition is None or not rose(repetition):
        return None
    increase = repetition.late - repetition.first
    if increase < REPETITIVE:
        return None
    return Symptom(
        "serious" if increase >= VERY_REPETITIVE else "warning",
        f"{repetition.late:.0%} of a response's 4-grams are repeats ({repetition.late_span}), up from "
        f"{repetition.first:.0%}, {_while_score_rises(score)}",
        (_stronger_kl(run),),
        "add a repetition penalty to the reward, such as kedge.rewards.penalties:repetitive",
    )


def _by_not_stopping(run: RunRecord) -> Symptom | None:
    score, stops = _rising_score(run), read(run, "response/eos_rate", at_least=MIN_TREND)
    if score is None or stops is None or not fell(stops) or stops.first - stops.late < FEWER_STOPS:
        return None
    correlation = read(run, "reward/length_correlation")
    explained_by_length = correlation is not None and correlation.early >= CORRELATED and not eos_is_scored(run)
    return Symptom(
        "warning" if explained_by_length else "serious",
        f"{stops.late:.0%} of the responses stop ({stops.late_span}), down from {stops.first:.0%}, "
        f"{_while_score_rises(score)}",
        (adjust(run, "rollout.missing_eos_score", "too_high"), _stronger_kl(run)),
        "score every response without a stop token below every response with one",
    )


def _no_judge(run: RunRecord) -> str:
    return "" if run.judges else "no judge (a reward of weight 0) measures what the score misses"


def _judge_down(run: RunRecord) -> Symptom | None:
    score = _rising_score(run)
    for name in (*run.judges, *HELD_OUT):
        judge = read(run, name, at_least=MIN_TREND)
        if score is None or judge is None or score.late < score.at(judge.peak_updates):
            continue
        lost = judge.peak - judge.late
        if lost <= max(SIGNIFICANT * judge.rise_error, LOST_GAIN * (judge.peak - judge.first)):
            continue
        kind = HELD_OUT.get(name, "a judge that is not trained on")
        return Symptom(
            "serious" if fell(judge) else "warning",
            f"{name}, {kind}, falls from {fmt(judge.peak)} ({span(judge.peak_updates)}) to "
            f"{fmt(judge.late)} ({judge.late_span}) {_while_score_rises(score)}; it started at "
            f"{fmt(judge.first)}",
            (_stronger_kl(run),),
            earlier_policy(run, name, judge),
        )
    return None


PROXY_UP_JUDGE_DOWN = Rule(
    "proxy_up_judge_down",
    "The reward is over-optimized: the score still rises, but quality as measured by an independent judge declines.",
    ("reward/score_mean", "score/NAME", "eval/win_rate", "eval/score"),
    _judge_down,
    Needs(("reward/score_mean",), MIN_TREND, lacks=_no_judge),
)

HACKING_BY_LENGTH = Rule(
    "hacking_by_length",
    "The score tracks the length of a response, and the policy exploits that instead of improving.",
    ("reward/score_mean", "response/length", "reward/length_correlation"),
    _by_length,
    Needs(("reward/score_mean", "response/length", "reward/length_correlation"), MIN_TREND),
)

HACKING_BY_REPETITION = Rule(
    "hacking_by_repetition",
    "Repetition raises the score, and the policy exploits that instead of improving.",
    ("reward/score_mean", "response/repetition"),
    _by_repetition,
    Needs(("reward/score_mean", "response/repetition"), MIN_TREND),
)

HACKING_BY_NOT_STOPPING = Rule(
    "hacking_by_not_stopping",
    "Truncated responses score higher than finished ones, and the policy exploits that by not stopping.",
    ("reward/score_mean", "response/eos_rate", "reward/length_correlation"),
    _by_not_stopping,
    Needs(("reward/score_mean", "response/eos_rate"), MIN_TREND),
)
