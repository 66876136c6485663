"""Non-finite values, skipped steps and gradient spikes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from kedge.inspect.doctor.finding import Remedy, Rule, Symptom
from kedge.inspect.doctor.needs import TRAINED, Needs
from kedge.inspect.doctor.remedies import scale, set_to
from kedge.inspect.doctor.trends import MIN_TREND, WINDOW, fmt, read, span
from kedge.inspect.record import RunRecord

__all__ = ["GRADIENT_SPIKES", "NOT_FINITE", "STEPS_SKIPPED"]

OFTEN = 0.1
"""Share of affected updates above which it is no longer an accident."""

NEIGHBORS = 8
"""Updates on either side that a gradient norm is compared with, since norms drift over a run."""

SPIKE = 8.0
"""Gradient norm, relative to the lower quartile of its neighbors, that is a spike. (If every third batch is an outlier,
so is the median.) Of the quartiles before and after it the larger counts: a critic's norm falls steeply while it is
fitted. In healthy runs norms stay within a factor of 3 after the first updates."""

RARE = 0.01
"""Share of spikes that is harmless: norm clipping handles them."""

CLIMB = 10.0
"""Growth of the gradient norm, late over early, that no healthy run shows."""


NORMS = {
    "policy/grad_norm": "the gradient norm",
    "value/grad_norm": "the critic's gradient norm",
    "grad_norm": "the gradient norm",
}
"""The norms of a run, in words. A critic that shares no gradient with the policy has its own."""


def _not_finite(run: RunRecord) -> Symptom | None:
    found = [incident for incident in run.incidents if incident.get("kind") == "nonfinite"]
    if not found:
        return None
    updates = sorted({incident["update"] for incident in found})
    stopped = any(incident.get("consequence") == "stop" for incident in found)
    return Symptom(
        "serious" if stopped or len(updates) > OFTEN * len(run.metrics) else "warning",
        f"{found[0]['what']} at {span(updates[:1])}"
        + (f"; {len(updates) - 1} more updates affected" if len(updates) > 1 else ""),
        (scale(run, "ppo.learning_rate", 1 / 3),),
        "inspect the response named in incidents.jsonl and the reward that scored it",
    )


def _steps_skipped(run: RunRecord) -> Symptom | None:
    steps = read(run, "guard/skipped_steps", at_least=1)
    skipped = steps.where(lambda count: count > 0) if steps else None
    if not steps or not skipped:
        return None
    return Symptom(
        "serious" if len(skipped) > max(1, OFTEN * len(steps)) else "warning",
        f"optimizer steps were skipped in {len(skipped)} of {len(steps)} updates ({span(skipped.updates)})",
        (scale(run, "ppo.learning_rate", 1 / 3),),
        "see incidents.jsonl for the reasons",
    )


def _gradient_spikes(run: RunRecord) -> Symptom | None:
    found = {each: spikes for each in NORMS if (spikes := _spikes_of(run, each))}
    if not found:
        return None
    seen, often = zip(*found.values(), strict=True)
    return Symptom("warning" if any(often) else "note", "; ".join(seen), tuple(_tame(run, found)))


def _spikes_of(run: RunRecord, name: str) -> tuple[str, bool] | None:
    """What is wrong with a norm, and whether it is more than norm clipping handles; None for nothing."""
    norm = read(run, name, at_least=MIN_TREND)
    if norm is None:
        return None
    usual = [_usual(norm.values, index) for index in range(len(norm))]
    spikes = [index for index in range(WINDOW, len(norm)) if norm.values[index] > SPIKE * usual[index] > 0]
    climbed = norm.late > CLIMB * norm.early > 0
    if not spikes and not climbed:
        return None
    seen: list[str] = []
    if spikes:
        worst = max(spikes, key=lambda index: norm.values[index])
        seen.append(
            f"{NORMS[name]} is {fmt(norm.values[worst])} at update {norm.updates[worst]}, where "
            f"{fmt(usual[worst])} is typical; {len(spikes)} of {len(norm)} updates have such a spike"
        )
    if climbed:
        seen.append(f"{NORMS[name]} grows from {fmt(norm.early)} to {fmt(norm.late)} ({norm.late_span})")
    return "; ".join(seen), climbed or len(spikes) > RARE * len(norm)


def _usual(norms: Sequence[float], index: int) -> float:
    sides = (norms[max(0, index - NEIGHBORS) : index], norms[index + 1 : index + 1 + NEIGHBORS])
    return max(sorted(side)[len(side) // 4] for side in sides if side)


def _tame(run: RunRecord, norms: Collection[str]) -> Iterator[Remedy]:
    section = {"reward": "reward_model"}.get(run.stage, run.stage or "ppo")
    if section == "ppo" and run.setting("ppo.spike_sigma") is None:
        yield set_to(run, "ppo.spike_sigma", 8, why="to skip such steps")
    has_own_rate = bool(run.setting("ppo.critic_learning_rate"))
    if "value/grad_norm" in norms and has_own_rate:
        yield scale(run, "ppo.critic_learning_rate", 1 / 3)
    if not (has_own_rate and set(norms) == {"value/grad_norm"}):
        yield scale(run, f"{section}.learning_rate", 1 / 3)


NOT_FINITE = Rule(
    "not_finite",
    "A score, logprob, loss or gradient was NaN or infinite: a division by zero in a reward function, corrupt weights, "
    "or steps so large that values overflow.",
    ("guard/skipped_steps",),
    _not_finite,
    Needs(),
)

STEPS_SKIPPED = Rule(
    "steps_skipped",
    "The guard discarded optimizer steps because their figures were non-finite or far too large. Once is an accident; "
    "a run that keeps skipping steps is not training.",
    ("guard/skipped_steps",),
    _steps_skipped,
    Needs(("guard/skipped_steps",)),
)

GRADIENT_SPIKES = Rule(
    "gradient_spikes",
    "Single batches have far larger gradients than the rest, or the gradients grow throughout: outlier scores, or "
    "weights that are diverging. Norm clipping limits the size of such a step, not its direction.",
    tuple(NORMS),
    _gradient_spikes,
    Needs(("policy/grad_norm|grad_norm",), MIN_TREND, TRAINED),
)
