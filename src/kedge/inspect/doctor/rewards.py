"""The score: whether it moves, which way, and whether those who give it are well."""

from __future__ import annotations

import math

from kedge.inspect.doctor.courses import CERTAIN, TREND, Course, course, figure, rose, span
from kedge.inspect.doctor.finding import Rule, Symptom
from kedge.inspect.doctor.remedies import scale
from kedge.inspect.doctor.responses import all_are_cut
from kedge.inspect.record import RunRecord

__all__ = ["REWARD_FLAT", "REWARD_FUNCTION_FAILING", "REWARD_SATURATED", "SCORE_FALLING"]

MANY_LOST = 0.1
"""Share of the responses without a score of their own at which the rest is no fair sample any more."""

SAME = 1e-3
"""Spread of the scores, in their mean's size, below which the policy has nothing to tell good from bad by."""

PATIENCE = 12
"""Updates after which a score should have moved; the demo's has after three."""

FLAT = 0.15
"""Change of the mean score, in standard deviations of the scores, that is none to speak of; healthy runs gain one or
more."""

LOST = 0.5
"""Fall of the mean score, in the same unit, that is no noise: a policy worse than the one it began as."""

USED_UP = 0.1
"""Spread of the scores, in what it was at first, at which nearly all responses have the same one."""


def _function_failing(run: RunRecord) -> Symptom | None:
    counters = _counters(run)
    totals = {name: sum(found.figures) for name, found in counters.items()}
    if not any(totals.values()):
        return None
    asked = len(run.metrics) * _responses(run)
    lost = {name: count for name, count in totals.items() if name.endswith(("_given_up", "unscored")) and count}
    failed = [name for name, count in totals.items() if name.endswith("_failures") and count]
    slow = any(count for name, count in totals.items() if name.endswith("_timeouts"))
    seen = [f"{name}: {totals[name]:g} in {span(counters[name].where(bool).updates)}" for name in failed]
    seen += [f"{name}: {count:g} of {asked} responses" for name, count in lost.items()]
    return Symptom(
        "serious" if max(lost.values(), default=0.0) > MANY_LOST * asked else "warning",
        "; ".join(seen or [f"{name}: {count:g}" for name, count in totals.items() if count]),
        (scale(run, "reward_functions.timeout" if slow else "reward_functions.retries", 2.0),),
        "reward.log has what it printed and raised",
    )


def _counters(run: RunRecord) -> dict[str, Course]:
    """What is counted of functions and of the responses that they left without a score, by metric."""
    endings = ("_failures", "_timeouts", "_given_up", "/unscored")
    names = {name for row in run.metrics for name in row if name.startswith("reward/") and name.endswith(endings)}
    found = {name: course(run, name, least=1) for name in sorted(names)}
    return {name: counted for name, counted in found.items() if counted}


def _flat(run: RunRecord) -> Symptom | None:
    score, spread = course(run, "reward/score_mean"), course(run, "reward/score_std")
    if score is None or spread is None or all_are_cut(run):
        return None
    if spread.late <= SAME * abs(score.late) and spread.first <= SAME * abs(score.first):
        return Symptom(
            "serious",
            f"all scores are {figure(score.late)}: they spread by {figure(spread.late)} in {spread.late_span}",
            advice="look at the reward: it gives every response the same score",
        )
    gain = score.late - score.first
    if len(score) < PATIENCE or abs(gain) > max(FLAT, CERTAIN / math.sqrt(_responses(run))) * spread.early:
        return None
    return Symptom(
        "warning",
        f"the mean score is {figure(score.first)} at first and {figure(score.late)} in {score.late_span}, while scores "
        f"spread by {figure(spread.late)}",
        (scale(run, "ppo.learning_rate", 3.0), scale(run, "rollout.num_prompts", 2.0)),
    )


def _responses(run: RunRecord) -> int:
    """Responses of an update: what the error of a mean score depends on."""
    return (run.setting("rollout.num_prompts") or 1) * (run.setting("rollout.num_responses") or 1)


def _falling(run: RunRecord) -> Symptom | None:
    score, spread = course(run, "reward/score_mean"), course(run, "reward/score_std")
    if score is None or spread is None:
        return None
    least = max(LOST, CERTAIN / math.sqrt(_responses(run))) * spread.first
    if score.first - score.late <= max(least, CERTAIN * score.error):
        return None
    return Symptom(
        "serious",
        f"the mean score falls from {figure(score.first)} to {figure(score.late)} ({score.late_span}); at first "
        f"scores spread by {figure(spread.first)}",
        (scale(run, "ppo.learning_rate", 1 / 3),),
    )


def _saturated(run: RunRecord) -> Symptom | None:
    score, spread = course(run, "reward/score_mean", least=TREND), course(run, "reward/score_std")
    if score is None or spread is None or not rose(score) or spread.late > USED_UP * spread.early:
        return None
    return Symptom(
        "warning",
        f"the scores spread by {figure(spread.late)} around {figure(score.late)} in {spread.late_span}, by "
        f"{figure(spread.early)} at first",
        (scale(run, "ppo.num_updates", 0.5),),
        "take an earlier checkpoint, harder prompts, or a reward that tells good responses apart",
    )


REWARD_FUNCTION_FAILING = Rule(
    "reward_function_failing",
    "A function that scores raises, hangs or breaks its contract. What is repeated costs time; what is given up is "
    "missing from the update, or has a score that it did not earn.",
    ("reward/NAME_failures", "reward/NAME_timeouts", "reward/NAME_given_up", "reward/unscored"),
    _function_failing,
)

REWARD_FLAT = Rule(
    "reward_flat",
    "The policy gets no better at what it is paid for: its steps are too small or too noisy, β holds it, or the "
    "reward does not tell its responses apart.",
    ("reward/score_mean", "reward/score_std", "response/eos_rate"),
    _flat,
)

SCORE_FALLING = Rule(
    "score_falling",
    "The policy is worse at what it is paid for than when it began. PPO cannot want that: its steps went too far, "
    "or something between score and gradient has the wrong sign.",
    ("reward/score_mean", "reward/score_std"),
    _falling,
)

REWARD_SATURATED = Rule(
    "reward_saturated",
    "Nearly every response has the best score there is. Advantages are what little is left, whitened to full size: "
    "the run goes on taking steps, and they are noise.",
    ("reward/score_mean", "reward/score_std"),
    _saturated,
)
