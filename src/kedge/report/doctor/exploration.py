"""How many different responses the policy has to a prompt."""

from __future__ import annotations

import math
from collections.abc import Iterator

from kedge.report.doctor.courses import TREND, Course, course, figure, rose, span
from kedge.report.doctor.finding import Remedy, Rule, Symptom
from kedge.report.doctor.remedies import change, scale
from kedge.report.record import RunRecord

__all__ = ["ENTROPY_COLLAPSE", "ENTROPY_RISING", "NO_EXPLORATION"]

ONE_RESPONSE = math.log(2.0)
"""Entropy of a whole response, in nats, below which a prompt has fewer than two likely responses: e to its power is how
many there are. PPO learns from what is better than the rest, and there is no rest."""

COLLAPSED, COLLAPSING = 0.1, 0.2
"""Entropy in what it was at first. It falls as the policy learns: to 0.34 in the demo, and to 0.36 in the fiercest of
those runs on stories that came out well."""

NOISE, NOISIER = 2.0, 1.3
"""The same upwards, where healthy runs stay under 1.1."""

NOISE_NATS = 0.1
"""And by how much, in nats per token: nothing has doubled that was next to nothing."""


def _in_whole(run: RunRecord, entropy: float, length: float) -> float:
    """Entropy of a response, in nats: that of its tokens, which the metric has the mean of."""
    return entropy * max(length, 1.0)


def _no_exploration(run: RunRecord) -> Symptom | None:
    entropy, length = course(run, "policy/entropy"), course(run, "response/length")
    if entropy is None or length is None:
        return None
    nats = _in_whole(run, entropy.early, length.early)
    if nats >= ONE_RESPONSE:
        return None
    return Symptom(
        "serious",
        f"the entropy is {figure(entropy.early)} nats per token from the start ({span(entropy.updates[:3])}), or about "
        f"{figure(math.exp(nats))} responses to a prompt",
        tuple(_more_varied(run)),
    )


def _more_varied(run: RunRecord) -> Iterator[Remedy]:
    temperature = run.setting("rollout.temperature")
    if isinstance(temperature, (int, float)) and temperature < 1:
        yield Remedy("rollout.temperature", "too_low", f"rollout.temperature=1.0 instead of {temperature:g}")
    else:
        yield scale(run, "rollout.temperature", 1.3)
    yield change("ppo.entropy_coef", 0.001, "a bonus for variety")


def _collapse(run: RunRecord) -> Symptom | None:
    entropy, length = course(run, "policy/entropy", least=TREND), course(run, "response/length", least=TREND)
    if entropy is None or length is None or entropy.early <= 0:
        return None
    left = entropy.late / entropy.early
    nats = _in_whole(run, entropy.late, length.late)
    single = nats < ONE_RESPONSE <= _in_whole(run, entropy.early, length.early) and left < 0.5
    if left > COLLAPSING and not single:
        return None
    return Symptom(
        "serious" if left < COLLAPSED or single else "warning",
        f"the entropy falls from {figure(entropy.early)} to {figure(entropy.late)} nats per token "
        f"({entropy.late_span}), or to about {figure(math.exp(min(nats, 50.0)))} responses to a prompt",
        tuple(_less_eager(run)),
    )


def _less_eager(run: RunRecord) -> Iterator[Remedy]:
    yield scale(run, "ppo.learning_rate", 1 / 3)
    coefficient = run.setting("ppo.entropy_coef")
    yield (
        scale(run, "ppo.entropy_coef", 3.0)
        if coefficient
        else Remedy("ppo.entropy_coef", "too_low", "ppo.entropy_coef=0.001 instead of 0")
    )
    yield Remedy("ppo.clip_range_high", "too_low", "ppo.clip_range_high=0.28, which lets unlikely tokens grow")


def _noise(run: RunRecord) -> Symptom | None:
    entropy = course(run, "policy/entropy")
    if entropy is None or entropy.early <= 0:
        return None
    growth, first = entropy.late / entropy.early, entropy.figures[0]
    # A bonus that is far too large is through with it before the third update.
    since_first = entropy.late / first if first > 0 else growth
    risen = max(growth, since_first)
    if risen < NOISIER or entropy.late - min(first, entropy.early) < NOISE_NATS or not _up(entropy):
        return None
    paid = (run.setting("ppo.entropy_coef") or 0) > 0 or run.setting("ppo.entropy_target") is not None
    return Symptom(
        "serious" if paid and risen >= NOISE else "warning",
        f"the entropy rises from {figure(min(first, entropy.early))} to {figure(entropy.late)} nats per token "
        f"({entropy.late_span})" + ("" if paid else ", although nothing pays for it"),
        (scale(run, "ppo.entropy_coef", 0.1),) if paid else (scale(run, "ppo.learning_rate", 1 / 3),),
    )


def _up(entropy: Course) -> bool:
    return len(entropy) < TREND or rose(entropy) or entropy.late > NOISE * entropy.figures[0]


NO_EXPLORATION = Rule(
    "no_exploration",
    "All responses to a prompt are alike: none is better than another, so there is nothing to learn from.",
    ("policy/entropy", "response/length"),
    _no_exploration,
)

ENTROPY_RISING = Rule(
    "entropy_rising",
    "The policy becomes more random, and text turns into noise: it is paid for that, or its steps destroy what it "
    "knew.",
    ("policy/entropy",),
    _noise,
)

ENTROPY_COLLAPSE = Rule(
    "entropy_collapse",
    "The policy has settled on one response to each prompt. What it has not found by now it will not find, and its "
    "gradients have nothing to compare.",
    ("policy/entropy", "response/length"),
    _collapse,
)
