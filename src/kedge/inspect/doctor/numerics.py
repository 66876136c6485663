"""Figures that are no numbers, steps that were left out, and gradients that jump."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kedge.inspect.doctor.courses import TREND, WINDOW, course, figure, span
from kedge.inspect.doctor.finding import Remedy, Rule, Symptom
from kedge.inspect.doctor.remedies import change, scale
from kedge.inspect.record import RunRecord

__all__ = ["GRADIENT_SPIKES", "NOT_FINITE", "STEPS_SKIPPED"]

OFTEN = 0.1
"""Share of a run's updates that may be left out: what is lost more often is no accident."""

NEIGHBOURS = 8
"""Updates on either side with which a gradient norm is compared, since it may drift over a run."""

SPIKE = 8.0
"""A gradient norm in the lower quartile of its neighbours' that is a spike; where every third batch is an outlier, the
median is one, too. In healthy runs norms stay within a factor of 3 once the first updates are over."""

RARE = 0.01
"""Share of spikes that are only good to know of: the clip of the norm takes care of them."""

CLIMB = 10.0
"""Growth of the gradient norm from early to late updates that no healthy run has."""


def _not_finite(run: RunRecord) -> Symptom | None:
    met = [incident for incident in run.incidents if incident.get("kind") == "nonfinite"]
    if not met:
        return None
    updates = sorted({incident["update"] for incident in met})
    ended = any(incident.get("consequence") == "stop" for incident in met)
    return Symptom(
        "serious" if ended or len(updates) > OFTEN * len(run.metrics) else "warning",
        f"{met[0]['what']} at {span(updates[:1])}" + (f", and {len(updates) - 1} more" if len(updates) > 1 else ""),
        (scale(run, "ppo.learning_rate", 1 / 3),),
        "look at the response that incidents.jsonl names, and at what scored it",
    )


def _steps_skipped(run: RunRecord) -> Symptom | None:
    found = course(run, "guard/skipped_steps", least=1)
    skipped = found.where(lambda steps: steps > 0) if found else None
    if not found or not skipped:
        return None
    return Symptom(
        "serious" if len(skipped) > max(1, OFTEN * len(found)) else "warning",
        f"optimiser steps were left out in {len(skipped)} of {len(found)} updates, {span(skipped.updates)}",
        (scale(run, "ppo.learning_rate", 1 / 3),),
        "incidents.jsonl has the reasons",
    )


def _gradient_spikes(run: RunRecord) -> Symptom | None:
    found = course(run, "policy/grad_norm", least=TREND) or course(run, "grad_norm", least=TREND)
    if found is None:
        return None
    usual = [_usual(found.figures, index) for index in range(len(found))]
    spikes = [index for index in range(WINDOW, len(found)) if found.figures[index] > SPIKE * usual[index] > 0]
    climbed = found.late > CLIMB * found.early > 0
    if not spikes and not climbed:
        return None
    seen = []
    if spikes:
        worst = max(spikes, key=lambda index: found.figures[index])
        seen.append(
            f"the gradient norm is {figure(found.figures[worst])} at update {found.updates[worst]}, where "
            f"{figure(usual[worst])} is usual; {len(spikes)} of {len(found)} stand out so"
        )
    if climbed:
        seen.append(f"the gradient norm climbs from {figure(found.early)} to {figure(found.late)} ({found.late_span})")
    often = climbed or len(spikes) > RARE * len(found)
    return Symptom("warning" if often else "note", "; ".join(seen), tuple(_gentler(run)))


def _usual(norms: Sequence[float], index: int) -> float:
    around = sorted(norms[max(0, index - NEIGHBOURS) : index + NEIGHBOURS + 1])
    return around[len(around) // 4]


def _gentler(run: RunRecord) -> Iterator[Remedy]:
    section = {"reward": "reward_model"}.get(run.stage, run.stage or "ppo")
    if section == "ppo" and run.setting("ppo.spike_sigma") is None:
        yield change("ppo.spike_sigma", 8, "which leaves such updates out")
    yield scale(run, f"{section}.learning_rate", 1 / 3)


NOT_FINITE = Rule(
    "not_finite",
    "A score, probability, loss or gradient was NaN or infinite: a division by nothing in a reward function, a "
    "damaged weight, or steps so large that the numbers ran over.",
    ("guard/skipped_steps",),
    _not_finite,
)

STEPS_SKIPPED = Rule(
    "steps_skipped",
    "What was too large or no number was not learnt from. Once that is an accident; again and again it is a run "
    "that does not train.",
    ("guard/skipped_steps",),
    _steps_skipped,
)

GRADIENT_SPIKES = Rule(
    "gradient_spikes",
    "Single batches push far harder than others, or the gradient grows all along: outliers among the scores, or "
    "weights on their way out. The clip of the norm keeps the length of such a step, not its direction.",
    ("policy/grad_norm", "grad_norm"),
    _gradient_spikes,
)
