"""The score: whether it improves, and whether the functions that compute it work."""

from __future__ import annotations

import math

from kedge.inspect.doctor.finding import Rule, Symptom
from kedge.inspect.doctor.remedies import scale
from kedge.inspect.doctor.responses import nearly_all_truncated
from kedge.inspect.doctor.trends import MIN_TREND, SIGNIFICANT, Series, fmt, read, rose, span
from kedge.inspect.record import RunRecord

__all__ = [
    "NEARLY_CONSTANT",
    "REWARD_FLAT",
    "REWARD_FUNCTION_FAILING",
    "REWARD_SATURATED",
    "SCORE_FALLING",
    "scores_are_constant",
]

MANY_LOST = 0.1
"""Share of responses without a score of their own above which the rest is a biased sample."""

NEARLY_CONSTANT = 1e-3
"""Standard deviation, relative to the mean, that is no more than rounding."""

PATIENCE = 12
"""Updates after which a score should have improved; the demo's has after three."""

FLAT = 0.15
"""Change of the mean score, in standard deviations of the scores, that is negligible; healthy runs gain one or more."""

LOST = 0.5
"""Fall of the mean score, in the same unit, that is not noise: the policy is worse than at the start."""

SATURATED = 0.1
"""Standard deviation of the scores, relative to the start, at which nearly all responses score the same."""


def scores_are_constant(score: Series, score_std: Series) -> bool:
    """Whether all responses score the same, from the first update to the last."""
    return score_std.late <= NEARLY_CONSTANT * abs(score.late) and score_std.first <= NEARLY_CONSTANT * abs(score.first)


def _function_failing(run: RunRecord) -> Symptom | None:
    counters = _counters(run)
    totals = {name: sum(counter.values) for name, counter in counters.items()}
    if not any(totals.values()):
        return None
    scored = len(run.metrics) * _num_responses(run)
    lost = {name: count for name, count in totals.items() if name.endswith(("_given_up", "unscored")) and count}
    failed = [name for name, count in totals.items() if name.endswith("_failures") and count]
    slow = any(count for name, count in totals.items() if name.endswith("_timeouts"))
    seen = [f"{name}: {totals[name]:g} in {span(counters[name].where(bool).updates)}" for name in failed]
    seen += [f"{name}: {count:g} of {scored} responses" for name, count in lost.items()]
    return Symptom(
        "serious" if max(lost.values(), default=0.0) > MANY_LOST * scored else "warning",
        "; ".join(seen or [f"{name}: {count:g}" for name, count in totals.items() if count]),
        (scale(run, "reward_functions.timeout" if slow else "reward_functions.retries", 2.0),),
        "see reward.log for the function's output and exceptions",
    )


def _counters(run: RunRecord) -> dict[str, Series]:
    """Counts of failures and of responses left without a score, by metric."""
    endings = ("_failures", "_timeouts", "_given_up", "/unscored")
    names = {name for row in run.metrics for name in row if name.startswith("reward/") and name.endswith(endings)}
    found = {name: read(run, name, at_least=1) for name in sorted(names)}
    return {name: counter for name, counter in found.items() if counter}


def _flat(run: RunRecord) -> Symptom | None:
    score, score_std = read(run, "reward/score_mean"), read(run, "reward/score_std")
    if score is None or score_std is None or nearly_all_truncated(run):
        return None
    if scores_are_constant(score, score_std):
        return Symptom(
            "serious",
            f"all scores are {fmt(score.late)}: their standard deviation is {fmt(score_std.late)} "
            f"({score_std.late_span})",
            advice="check the reward: it gives every response the same score",
        )
    score = read(run, "reward/score_mean", at_least=PATIENCE, of_policy=True)
    if score is None:
        return None
    gain = score.late - score.first
    if abs(gain) > max(FLAT, SIGNIFICANT / math.sqrt(_num_responses(run))) * score_std.early:
        return None
    return Symptom(
        "warning",
        f"the mean score is {fmt(score.first)} in update {score.updates[0]} and {fmt(score.late)} in "
        f"{score.late_span}, with a standard deviation of {fmt(score_std.late)} between responses",
        (scale(run, "ppo.learning_rate", 3.0), scale(run, "rollout.num_prompts", 2.0)),
    )


def _num_responses(run: RunRecord) -> int:
    """Responses per update, which determine the error of a mean score."""
    return (run.setting("rollout.num_prompts") or 1) * (run.setting("rollout.num_responses") or 1)


def _falling(run: RunRecord) -> Symptom | None:
    score, score_std = read(run, "reward/score_mean"), read(run, "reward/score_std")
    if score is None or score_std is None:
        return None
    threshold = max(LOST, SIGNIFICANT / math.sqrt(_num_responses(run))) * score_std.first
    if score.first - score.late <= max(threshold, SIGNIFICANT * score.rise_error):
        return None
    return Symptom(
        "serious",
        f"the mean score falls from {fmt(score.first)} to {fmt(score.late)} ({score.late_span}); the scores' standard "
        f"deviation was {fmt(score_std.first)} in the first update",
        (scale(run, "ppo.learning_rate", 1 / 3),),
    )


def _saturated(run: RunRecord) -> Symptom | None:
    score, score_std = read(run, "reward/score_mean", at_least=MIN_TREND), read(run, "reward/score_std")
    if score is None or score_std is None or not rose(score) or score_std.late > SATURATED * score_std.early:
        return None
    return Symptom(
        "warning",
        f"the scores' standard deviation falls from {fmt(score_std.early)} to {fmt(score_std.late)} at a mean score of "
        f"{fmt(score.late)} ({score_std.late_span})",
        (scale(run, "ppo.num_updates", 0.5),),
        "use an earlier checkpoint, harder prompts, or a reward that tells good responses apart",
    )


REWARD_FUNCTION_FAILING = Rule(
    "reward_function_failing",
    "A reward function raises, times out or returns invalid scores. Retries cost time; the responses it gives up on "
    "are left out of the update or get a substitute score.",
    ("reward/NAME_failures", "reward/NAME_timeouts", "reward/NAME_given_up", "reward/unscored"),
    _function_failing,
)

REWARD_FLAT = Rule(
    "reward_flat",
    "The policy does not improve its score: its steps are too small or too noisy, β is too large, or the reward does "
    "not tell the responses apart.",
    ("reward/score_mean", "reward/score_std", "response/eos_rate"),
    _flat,
)

SCORE_FALLING = Rule(
    "score_falling",
    "The policy scores worse than at the start, the opposite of what PPO optimizes: the steps are too large, or a sign "
    "is wrong somewhere between score and gradient.",
    ("reward/score_mean", "reward/score_std"),
    _falling,
)

REWARD_SATURATED = Rule(
    "reward_saturated",
    "Nearly every response already gets the best score. Whitening scales the remaining differences up to unit "
    "variance, so further steps follow noise.",
    ("reward/score_mean", "reward/score_std"),
    _saturated,
)
