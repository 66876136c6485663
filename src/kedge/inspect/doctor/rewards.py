"""The score: whether it improves, and whether the functions that compute it work."""

from __future__ import annotations

import math

from kedge.inspect.doctor.finding import Rule, Symptom
from kedge.inspect.doctor.needs import Needs
from kedge.inspect.doctor.remedies import scale
from kedge.inspect.doctor.responses import nearly_all_truncated, num_responses, num_sampled
from kedge.inspect.doctor.trends import MIN_LEVEL, MIN_TREND, SIGNIFICANT, Series, fmt, read, rose, span
from kedge.inspect.record import RunRecord

__all__ = [
    "NEARLY_CONSTANT",
    "RESPONSES_UNSCORED",
    "REWARD_FLAT",
    "REWARD_FUNCTION_FAILING",
    "REWARD_SATURATED",
    "SCORE_FALLING",
    "scores_are_constant",
]

MANY_LOST = 0.1
"""Share of responses without a score of their own above which the rest is a biased sample."""

MANY_UNSCORED, MOSTLY_UNSCORED = 0.1, 0.5
"""Share of responses for which the reward returns None on purpose. At a tenth, the error of an update's mean grows by
5 %; at half, by 40 %, and half of the sampling is wasted."""

NEARLY_CONSTANT = 1e-3
"""Standard deviation, relative to the mean, that is no more than rounding."""

PATIENCE = 12
"""Updates after which a score should have improved; the demo's has after three."""

FLAT = 0.15
"""Change of the mean score, in standard deviations of the scores, that is negligible; healthy runs gain one or more."""

LOST = 0.5
"""Fall of the mean score, in the same unit, that is not noise: the policy is worse than at the start."""

FAR_BELOW = 3.0
"""The same within updates too few for a trend."""

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
    scored = num_sampled(run, [row["update"] for row in run.metrics])
    lost = {name: count for name, count in totals.items() if name.endswith("_given_up") and count}
    failed = [name for name, count in totals.items() if name.endswith("_failures") and count]
    slow = any(count for name, count in totals.items() if name.endswith("_timeouts"))
    seen = [f"{name}: {totals[name]:g} in {span(counters[name].where(bool).updates)}" for name in failed]
    seen += [f"{name}: {count:g} of {scored:g} responses" for name, count in lost.items()]
    return Symptom(
        "serious" if max(lost.values(), default=0.0) > MANY_LOST * scored else "warning",
        "; ".join(seen or [f"{name}: {count:g}" for name, count in totals.items() if count]),
        (scale(run, "reward_functions.timeout" if slow else "reward_functions.retries", 2.0),),
        "see reward.log for the function's output and exceptions",
    )


def _counters(run: RunRecord) -> dict[str, Series]:
    """Counts of failed calls, and of responses that a function has given up on, by metric."""
    endings = ("_failures", "_timeouts", "_given_up")
    names = {name for row in run.metrics for name in row if name.startswith("reward/") and name.endswith(endings)}
    found = {name: read(run, name, at_least=1) for name in sorted(names)}
    return {name: counter for name, counter in found.items() if counter}


def _unscored(run: RunRecord) -> Symptom | None:
    unscored = read(run, "reward/unscored", at_least=1)
    if unscored is None:
        return None
    failed = _dropped(run)
    none = [
        max(0.0, count - failed.get(update, 0.0))
        for update, count in zip(unscored.updates, unscored.values, strict=True)
    ]
    share = sum(none) / num_sampled(run, unscored.updates)
    if share <= MANY_UNSCORED:
        return None
    return Symptom(
        "warning" if share > MOSTLY_UNSCORED else "note",
        f"{_why_unscored(run, share)} ({span(unscored.updates)}); the updates learn from the rest",
        (scale(run, "rollout.num_prompts", 1 / max(1 - share, 0.1)),),
        "check that None is meant: the policy learns nothing from such a response, so a bad one needs a low score",
    )


def _why_unscored(run: RunRecord, share: float) -> str:
    if run.setting("ppo.advantage") == "remax":
        return f"{share:.0%} of the responses have no score, or the greedy response to their prompt has none"
    return f"the reward returned None for {share:.0%} of the responses"


def _dropped(run: RunRecord) -> dict[int, float]:
    """By update, the responses dropped because a function failed on them: they have no score, but not by choice."""
    if run.setting("reward_functions.on_error") == "value":
        return {}
    judges = {f"reward/{name.removeprefix('score/')}_given_up" for name in run.judges}
    dropped: dict[int, float] = {}
    for name, counter in _counters(run).items():
        if name.endswith("_given_up") and name not in judges:
            for update, count in zip(counter.updates, counter.values, strict=True):
                dropped[update] = dropped.get(update, 0.0) + count
    return dropped


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
    if abs(gain) > max(FLAT, SIGNIFICANT / math.sqrt(num_responses(run))) * score_std.early:
        return None
    return Symptom(
        "warning",
        f"the mean score is {fmt(score.first)} in update {score.updates[0]} and {fmt(score.late)} in "
        f"{score.late_span}, with a standard deviation of {fmt(score_std.late)} between responses",
        (scale(run, "ppo.learning_rate", 3.0), scale(run, "rollout.num_prompts", 2.0)),
    )


def _falling(run: RunRecord) -> Symptom | None:
    score, score_std = read(run, "reward/score_mean", at_least=2), read(run, "reward/score_std", at_least=2)
    if score is None or score_std is None:
        return None
    if len(score) < MIN_LEVEL:
        return _fallen_at_once(run, score, score_std)
    threshold = max(LOST, SIGNIFICANT / math.sqrt(num_responses(run))) * score_std.first
    if score.first - score.late <= max(threshold, SIGNIFICANT * score.rise_error):
        return None
    return Symptom(
        "serious",
        f"the mean score falls from {fmt(score.first)} to {fmt(score.late)} ({score.late_span}); the scores' standard "
        f"deviation was {fmt(score_std.first)} in the first update",
        (scale(run, "ppo.learning_rate", 1 / 3),),
    )


def _fallen_at_once(run: RunRecord, score: Series, score_std: Series) -> Symptom | None:
    """A score that the first updates have brought below nearly all of the first scores."""
    if score_std.first <= 0 or score.first - score.values[-1] <= FAR_BELOW * score_std.first:
        return None
    return Symptom(
        "serious",
        f"the mean score falls from {fmt(score.first)} to {fmt(score.values[-1])} ({span(score.updates)}); the scores' "
        f"standard deviation was {fmt(score_std.first)} in the first update",
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
    ("reward/NAME_failures", "reward/NAME_timeouts", "reward/NAME_given_up"),
    _function_failing,
    Needs(),
)

RESPONSES_UNSCORED = Rule(
    "responses_unscored",
    "A reward function returns None, which means no score, for many responses. They are sampled and then left out of "
    "the update, which is smaller and noisier for it.",
    ("reward/unscored", "reward/NAME_given_up"),
    _unscored,
    Needs(("reward/unscored",)),
)

REWARD_FLAT = Rule(
    "reward_flat",
    "The policy does not improve its score: its steps are too small or too noisy, β is too large, or the reward does "
    "not tell the responses apart.",
    ("reward/score_mean", "reward/score_std", "response/eos_rate"),
    _flat,
    Needs(("reward/score_mean", "reward/score_std"), PATIENCE, of_policy=True),
)

SCORE_FALLING = Rule(
    "score_falling",
    "The policy scores worse than at the start, the opposite of what PPO optimizes: the steps are too large, or a sign "
    "is wrong somewhere between score and gradient.",
    ("reward/score_mean", "reward/score_std"),
    _falling,
    Needs(("reward/score_mean", "reward/score_std"), MIN_LEVEL),
)

REWARD_SATURATED = Rule(
    "reward_saturated",
    "Nearly every response already gets the best score. Whitening, or division by a group's standard deviation, scales "
    "the remaining differences up, so further steps follow noise; without either, there is little left to learn.",
    ("reward/score_mean", "reward/score_std"),
    _saturated,
    Needs(("reward/score_mean", "reward/score_std"), MIN_TREND),
)
