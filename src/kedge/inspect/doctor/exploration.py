"""How many different responses the policy has to a prompt."""

from __future__ import annotations

import math
from collections.abc import Iterator

from kedge.inspect.doctor.courses import ENOUGH, TREND, WINDOW, Course, combined, course, figure, rose, span
from kedge.inspect.doctor.finding import Remedy, Rule, Symptom
from kedge.inspect.doctor.remedies import change, scale
from kedge.inspect.record import RunRecord

__all__ = ["ENTROPY_COLLAPSE", "ENTROPY_RISING", "NO_EXPLORATION"]

ONE_RESPONSE, FEW_RESPONSES = math.log(2.0), math.log(3.0)
"""Entropy of a whole response, in nats, below which a prompt has fewer than two or three likely responses: e to its
power is how many there are. PPO learns from what is better than the rest, and there is no rest."""

COLLAPSED, COLLAPSING, SETTLING = 0.1, 0.2, 0.5
"""The same in what it was at first. It falls as the policy learns: to 0.4 in the demo, and to 0.36 in the fiercest of
those runs on stories that came out well."""

NOISE, NOISIER = 2.0, 1.3
"""The same upwards, where healthy runs stay under 1.1."""

NOISE_NATS = 0.1
"""And by how much, in nats per token: nothing has doubled that was next to nothing."""


def _of_a_response(run: RunRecord, *, least: int) -> Course | None:
    """Entropy of whole responses, in nats."""
    return combined(run, ("policy/entropy", "response/length"), lambda nats, length: nats * length, least=least)


def _no_exploration(run: RunRecord) -> Symptom | None:
    nats = _of_a_response(run, least=ENOUGH)
    if nats is None or nats.early >= ONE_RESPONSE:
        return None
    return Symptom(
        "serious",
        f"a response has an entropy of {figure(nats.early)} nats from the start ({span(nats.updates[:WINDOW])}): there "
        f"are about {figure(math.exp(nats.early))} likely responses to a prompt",
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
    nats = _of_a_response(run, least=TREND)
    if nats is None or nats.early < ONE_RESPONSE:
        return None
    left, few = nats.late / nats.early, nats.late < FEW_RESPONSES
    if left > COLLAPSING and not (few and left < SETTLING):
        return None
    return Symptom(
        "serious" if left < COLLAPSED or (few and left < COLLAPSING) else "warning",
        f"the entropy of a response falls from {figure(nats.early)} to {figure(nats.late)} nats ({nats.late_span})"
        + (f": about {figure(math.exp(nats.late))} likely responses to a prompt are left" if few else ""),
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
    # A bonus that is far too large has done its work before the third update.
    base = min(entropy.first, entropy.early) if entropy else 0.0
    if entropy is None or base <= 0:
        return None
    risen = entropy.late / base
    certain = len(entropy) < TREND or rose(entropy) or risen >= NOISE
    if risen < NOISIER or entropy.late - base < NOISE_NATS or not certain:
        return None
    paid = (run.setting("ppo.entropy_coef") or 0) > 0 or run.setting("ppo.entropy_target") is not None
    return Symptom(
        "serious" if paid and risen >= NOISE else "warning",
        f"the entropy rises from {figure(base)} to {figure(entropy.late)} nats per token ({entropy.late_span})"
        + ("" if paid else ", although nothing pays for it"),
        (scale(run, "ppo.entropy_coef", 0.1) if paid else scale(run, "ppo.learning_rate", 1 / 3),),
    )


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
