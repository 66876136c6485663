"""How varied the policy's responses to a prompt are."""

from __future__ import annotations

import math
from collections.abc import Iterator

from kedge.inspect.doctor.finding import Remedy, Rule, Symptom
from kedge.inspect.doctor.needs import Needs
from kedge.inspect.doctor.remedies import scale, set_to
from kedge.inspect.doctor.trends import MIN_LEVEL, MIN_TREND, WINDOW, Series, combine, fmt, read, rose, span
from kedge.inspect.record import RunRecord

__all__ = ["ENTROPY_COLLAPSE", "ENTROPY_RISING", "NO_EXPLORATION"]

TWO_RESPONSES, THREE_RESPONSES = math.log(2.0), math.log(3.0)
"""Entropy of a whole response, in nats, that corresponds to two or three likely responses per prompt (exp of it). PPO
learns from what is better than the rest; with one response there is no rest."""

COLLAPSED, COLLAPSING, SETTLING = 0.1, 0.2, 0.5
"""Entropy relative to its start. It falls in every run that learns: to 0.4 in the demo, and to 0.36 in the most
aggressive of the story runs that ended well."""

NOTHING = 0.01
"""The same within updates too few for a trend, or of a policy that the steps have wrecked."""

DOUBLED, RISEN = 2.0, 1.3
"""The same upwards; healthy runs stay below 1.1."""

RISEN_NATS = 0.1
"""Smallest rise, in nats per token: doubling next to nothing is no problem."""


def _response_entropy(run: RunRecord, *, at_least: int) -> Series | None:
    """Entropy of whole responses, in nats."""
    return combine(run, ("policy/entropy", "response/length"), lambda nats, length: nats * length, at_least=at_least)


def _no_exploration(run: RunRecord) -> Symptom | None:
    entropy = _response_entropy(run, at_least=MIN_LEVEL)
    if entropy is None or entropy.early >= TWO_RESPONSES:
        return None
    return Symptom(
        "serious",
        f"a response has an entropy of {fmt(entropy.early)} nats from the start ({span(entropy.updates[:WINDOW])}): "
        f"about {fmt(math.exp(entropy.early))} likely responses per prompt",
        tuple(_explore_more(run)),
    )


def _explore_more(run: RunRecord) -> Iterator[Remedy]:
    temperature = run.setting("rollout.temperature")
    if isinstance(temperature, (int, float)) and temperature < 1:
        yield set_to(run, "rollout.temperature", 1.0, "too_low")
    else:
        yield scale(run, "rollout.temperature", 1.3)
    yield set_to(run, "ppo.entropy_coef", 0.001, why="as an exploration bonus")


def _collapse(run: RunRecord) -> Symptom | None:
    entropy = _response_entropy(run, at_least=MIN_TREND)
    if entropy is None:
        return _collapse_at_once(run)
    if entropy.early < TWO_RESPONSES:
        return None
    left, few = entropy.late / entropy.early, entropy.late < THREE_RESPONSES
    if left > COLLAPSING and not (few and left < SETTLING):
        return None
    return Symptom(
        "serious" if left < COLLAPSED or (few and left < COLLAPSING) else "warning",
        f"the entropy of a response falls from {fmt(entropy.early)} to {fmt(entropy.late)} nats ({entropy.late_span})"
        + (f": about {fmt(math.exp(entropy.late))} likely responses per prompt are left" if few else ""),
        tuple(_slow_down(run, left)),
    )


def _collapse_at_once(run: RunRecord) -> Symptom | None:
    """An entropy of which the first updates have left nothing."""
    entropy = _response_entropy(run, at_least=2)
    if entropy is None or entropy.first < TWO_RESPONSES or entropy.values[-1] > NOTHING * entropy.first:
        return None
    return Symptom(
        "serious",
        f"the entropy of a response falls from {fmt(entropy.first)} to {fmt(entropy.values[-1])} nats "
        f"({span(entropy.updates)})",
        tuple(_slow_down(run, entropy.values[-1] / entropy.first)),
    )


def _slow_down(run: RunRecord, left: float) -> Iterator[Remedy]:
    yield scale(run, "ppo.learning_rate", 0.1 if left < NOTHING else 1 / 3)
    if run.setting("ppo.entropy_coef"):
        yield scale(run, "ppo.entropy_coef", 3.0)
    else:
        yield set_to(run, "ppo.entropy_coef", 0.001, "too_low")
    if run.setting("ppo.clip_range_high") is None:
        yield set_to(run, "ppo.clip_range_high", 0.28, "too_low")


def _rising(run: RunRecord) -> Symptom | None:
    entropy = read(run, "policy/entropy")
    # A bonus that is far too large acts within the first three updates.
    start = min(entropy.first, entropy.early) if entropy else 0.0
    if entropy is None or start <= 0:
        return None
    factor = entropy.late / start
    significant = len(entropy) < MIN_TREND or rose(entropy) or factor >= DOUBLED
    if factor < RISEN or entropy.late - start < RISEN_NATS or not significant:
        return None
    bonus = (run.setting("ppo.entropy_coef") or 0) > 0 or run.setting("ppo.entropy_target") is not None
    return Symptom(
        "serious" if bonus and factor >= DOUBLED else "warning",
        f"entropy rises from {fmt(start)} to {fmt(entropy.late)} nats per token ({entropy.late_span})"
        + ("" if bonus else " without an entropy bonus"),
        (scale(run, "ppo.entropy_coef", 0.1) if bonus else scale(run, "ppo.learning_rate", 1 / 3),),
    )


NO_EXPLORATION = Rule(
    "no_exploration",
    "All responses to a prompt are nearly identical. None scores better than another, so there is nothing to learn "
    "from.",
    ("policy/entropy", "response/length"),
    _no_exploration,
    Needs(("policy/entropy", "response/length"), MIN_LEVEL),
)

ENTROPY_RISING = Rule(
    "entropy_rising",
    "The policy is becoming more random and its text is turning into noise: the entropy bonus is too large, or the "
    "steps destroy what the policy had learned.",
    ("policy/entropy",),
    _rising,
    Needs(("policy/entropy",), MIN_LEVEL),
)

ENTROPY_COLLAPSE = Rule(
    "entropy_collapse",
    "The policy is settling on one response per prompt. It stops exploring, and its responses differ too little to "
    "learn from.",
    ("policy/entropy", "response/length"),
    _collapse,
    Needs(("policy/entropy", "response/length"), MIN_TREND),
)
