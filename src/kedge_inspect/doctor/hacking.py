"""Reward hacking: the score rises for the wrong reason.

A reward term with weight 0 is a *judge*: it is measured as `score/NAME` and not trained on.
"""

from __future__ import annotations

from kedge_base.run_folder.output import best_checkpoint, kept_checkpoints
from kedge_inspect.doctor.kl import stronger_kl
from kedge_inspect.doctor.responses import (
    ending_in_time,
    eos_is_scored,
    has_episodes,
    move_missing_eos_score,
    parts_of,
    turn_lengths,
)
from kedge_inspect.doctor.rule import Symptom, rule
from kedge_inspect.doctor.series import MIN_TREND, SIGNIFICANT, Series, fell, fmt, read, rose, span
from kedge_inspect.record import RunRecord

LONGER = 1.4
MUCH_LONGER = 1.75
"""Thresholds of a warning and of a serious finding: the length of the responses, relative to the start. The demo's grow
by a quarter to a third, since summaries that omit something are short."""

SHORTER = 0.5
"""Length of the responses, relative to the start, up to which a negative correlation with the score is a finding."""

CORRELATED = 0.5
"""Correlation of score and length at which length explains a quarter of the score's variance. Reward models of human
preferences have 0.3 to 0.5 (Singhal et al. 2023, arXiv 2310.03716).
"""

LITTLE_ELSE = 0.9
"""Correlation at which the score is little more than the length."""

REPETITIVE = 0.1
VERY_REPETITIVE = 0.2
"""Thresholds of a warning and of a serious finding: the rise in the share of repeated 4-grams. Natural short text has
almost none."""

LOST_GAIN = 0.25
"""Share of a judge's best gain that it may lose again: its curve is flat near the maximum, and the highest of many
noisy figures is too high.
"""

HELD_OUT: dict[str, str] = dict.fromkeys(("eval/win_rate", "eval/score"), "measured on held-out prompts")
"""Metrics of the evaluations during a run that serve as judges."""

FEWER_STOPS = 0.25
"""Smallest fall in the share of responses that stop that is reported."""


def _while_score_rises(score: Series) -> str:
    return f"while the mean score rises from {fmt(score.first)} to {fmt(score.late)}"


@rule(
    "The score tracks the length of a response, and the policy exploits that instead of improving.",
    needs=("reward/score_mean", "response/length", "reward/length_correlation"),
    updates=MIN_TREND,
)
def hacking_by_length(run: RunRecord, score: Series, length: Series, correlation: Series) -> Symptom | None:
    """Seen: While the score rises, `response/length` changes, with an environment that of a turn, and
    `reward/length_correlation` is high.

    Try: Add a length penalty to the reward, or train the reward model on pairs of equal length; triple `ppo.kl_coef`.

    Threshold: A correlation of 0.5 (reward models of human preferences have 0.3 to 0.5) with 40% longer responses: a
    warning; 75% is serious. The demo's grow by a quarter to a third. Likewise a correlation of −0.5 and half the
    length: serious; but a note if functions alone score, since they may ask for short responses, unless the correlation
    is −0.9.
    """
    length = turn_lengths(run, length)
    growth = length.late / max(length.first, 1.0)
    strongest = max((correlation.early, correlation.late), key=abs)  # late lengths may all be the same
    longer = growth >= LONGER and rose(length) and strongest >= CORRELATED
    shorter = growth <= SHORTER and strongest <= -CORRELATED
    if not rose(score) or not (longer or shorter):
        return None
    functions_score = bool(run.roles) and not any(role.startswith("reward") for role in run.roles)
    asked = shorter and strongest > -LITTLE_ELSE and functions_score
    return Symptom(
        "note" if asked else "serious" if growth >= MUCH_LONGER or shorter else "warning",
        f"{parts_of(run)} go from {fmt(length.first)} to {fmt(length.late)} tokens ({length.late_span}) "
        f"{_while_score_rises(score)}; the correlation of score and length is {fmt(strongest)}",
        stronger_kl(run),
        f"add a penalty for {'short' if shorter else 'long'} responses to the reward, or train the reward model on "
        "pairs of equal length",
    )


@rule(
    "Repetition raises the score, and the policy exploits that instead of improving.",
    needs=("reward/score_mean", "response/repetition"),
    updates=MIN_TREND,
)
def hacking_by_repetition(run: RunRecord, score: Series, repetition: Series) -> Symptom | None:
    """Seen: While the score rises, `response/repetition` rises.

    Try: Add a repetition penalty such as `kedge.rewards.penalties:repetitive`; triple `ppo.kl_coef`.

    Threshold: 0.1 more repeated 4-grams than in the first update is a warning, 0.2 serious. The metric compares no turn
    of an episode with another; `repetitive` does, and reads the environment's words as well.
    """
    increase = repetition.late - repetition.first
    if not rose(score) or not rose(repetition) or increase < REPETITIVE:
        return None
    return Symptom(
        "serious" if increase >= VERY_REPETITIVE else "warning",
        f"{repetition.late:.0%} of a response's 4-grams are repeats ({repetition.late_span}), up from "
        f"{repetition.first:.0%}, {_while_score_rises(score)}",
        stronger_kl(run),
        "add a repetition penalty to the reward"
        + ("" if has_episodes(run) else ", such as kedge.rewards.penalties:repetitive"),
    )


@rule(
    "Truncated responses score higher than finished ones, and the policy exploits that by not stopping.",
    needs=("reward/score_mean", "response/eos_rate"),
    updates=MIN_TREND,
)
def hacking_by_not_stopping(run: RunRecord, score: Series, stops: Series) -> Symptom | None:
    """Seen: While the score rises, `response/eos_rate` falls; with an environment, `episode/max_tokens` rises.

    Try: Set or lower `rollout.missing_eos_score` until a response without a stop token scores below every one with it
    (`subtract` is doubled); triple `ppo.kl_coef`.

    Threshold: A fall of 0.25. Serious; a warning if missing stop tokens have no separate score and the score
    correlates with length, which is then the cause.
    """
    stops = ending_in_time(run, stops)
    if not rose(score) or not fell(stops) or stops.first - stops.late < FEWER_STOPS:
        return None
    correlation = read(run, "reward/length_correlation")
    explained_by_length = correlation is not None and correlation.early >= CORRELATED and not eos_is_scored(run)
    return Symptom(
        "warning" if explained_by_length else "serious",
        f"{stops.late:.0%} of the responses stop ({stops.late_span}), down from {stops.first:.0%}, "
        f"{_while_score_rises(score)}",
        (move_missing_eos_score(run, "too_high"), *stronger_kl(run)),
        "score every response without a stop token below every response with one",
    )


def _no_judge(run: RunRecord) -> str:
    held_out = any(len(run.series(name)[1]) >= MIN_TREND for name in HELD_OUT)
    return "" if run.judges or held_out else "no judge (a reward of weight 0) measures what the score misses"


@rule(
    "The reward is over-optimized: the score still rises, but quality as measured by an independent judge declines.",
    needs=("reward/score_mean",),
    updates=MIN_TREND,
    lacks=_no_judge,
)
def proxy_up_judge_down(run: RunRecord, score: Series) -> Symptom | None:
    """Seen: `reward/score_mean` rises while the `score/NAME` of a judge, or `eval/win_rate` or `eval/score` on held-out
    prompts, falls.

    Try: Use the policy of the kept checkpoint where the judge was highest, which is named (`--model runs/ppo@8`), or
    set the named fields so that the next run keeps one; triple `ppo.kl_coef`.

    Threshold: The judge loses a quarter of its best gain, and more than three standard errors: a warning. Serious if it
    also ends significantly below its early figures.
    """
    for name in (*run.judges, *HELD_OUT):
        judge = read(run, name, at_least=MIN_TREND)
        if not rose(score) or judge is None or score.late < score.during(judge.peak_updates):
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
            stronger_kl(run),
            earlier_policy(run, name, judge),
        )
    return None


NUM_EVALUATIONS = 10
"""Number of evaluations in a run that suffices to find one near the best update."""


def earlier_policy(run: RunRecord, name: str, quality: Series) -> str:
    """Advice on recovering the policy of an earlier update.

    Names the kept checkpoint at which the quality was highest, if that is closer to the peak than to the end.

    Args:
        run: The run.
        name: The metric that has passed its peak; higher is better. `eval/…` is measured after the update, others on
            the update's responses.
        quality: Its values.
    """
    held_out = name.startswith("eval/")
    # An update's responses are sampled before its steps, by the previous update's policy.
    shift = 0 if held_out else 1
    values = {update - shift: value for update, value in quality.items}
    values[quality.updates[-1]] = quality.values[-1]
    kept = [update for update in kept_checkpoints(run.folder) if update in values]
    nearest = max(kept, key=lambda update: values[update], default=None)
    if nearest is None or values[nearest] < (max(quality.values) + quality.values[-1]) / 2:
        every = max(1, max(quality.updates) // NUM_EVALUATIONS)
        return (
            f"no checkpoint near update {quality.argmax} was kept: ppo.eval_every={every} with "
            f"checkpoint.keep_best={name if held_out else f'eval/{name}'} keeps the best one of the next run"
        )
    which = "best" if nearest == best_checkpoint(run.folder) else str(nearest)
    return f"use the policy after update {nearest}: --model {run.folder}@{which}"
