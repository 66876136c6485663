"""Do those who sample and those who train mean the same policy?"""

from __future__ import annotations

from kedge.inspect.doctor.courses import CERTAIN, Course, combined, course, figure, span
from kedge.inspect.doctor.finding import Rule, Symptom
from kedge.inspect.doctor.remedies import change
from kedge.inspect.record import RunRecord

__all__ = ["MAX_RATIO", "SAMPLER_TRAINER_MISMATCH", "SAMPLING_NOT_MIRRORED", "STALE_ROLLOUTS"]

MAX_RATIO = {"fp32": 1.01, "bf16": 1.5}
"""Largest ratio of two probabilities of one token that rounding explains. A copy of `training.guard.guard.MAX_RATIO`,
which this layer may not import; a test keeps the two equal."""

SURPRISE = ("objective/logprobs", "policy/entropy", "response/length", "policy/approx_kl")

OFF = 1.15
"""How far a response's surprise may be from its entropy, its mean: in sound runs the run's median is 0.95 to 1.12. Half
the temperature makes it 0.5 where a policy is sure of most tokens, and 0.8 where it hesitates at each."""

SAME_ENTROPY = 0.05
"""Nats per token that an update may move the policy by: the entropy is measured while it does."""

SURE = 0.7
"""Nats of entropy below which a response is all but certain, and rare surprises make up its mean."""

RATIOS = {
    "policy/first_ratio_max": "in the first optimiser step and before it, under the same weights",
    "policy/sampler_ratio_max": "when it was trained on and when it was sampled",
}


def _beyond_rounding(run: RunRecord) -> tuple[str, Course] | None:
    """When probabilities of a token are furthest apart, in words, and the ratios that rounding does not explain."""
    bound = MAX_RATIO.get(run.facts.get("precision", ""), MAX_RATIO["bf16"])
    courses = {when: course(run, name, least=1) for name, when in RATIOS.items()}
    beyond = {when: found.where(lambda ratio: ratio > bound) for when, found in courses.items() if found}
    apart = {when: found for when, found in beyond.items() if len(found)}
    return max(apart.items(), key=lambda item: max(item[1].figures)) if apart else None


def _mismatch(run: RunRecord) -> Symptom | None:
    told = next((incident for incident in run.incidents if incident.get("kind") == "mismatch"), None)
    if beyond := _beyond_rounding(run):
        when, ratios = beyond
        seen = (
            f"a token's probabilities {when} are up to {figure(max(ratios.figures))} to 1, at update {ratios.highest}; "
            f"beyond rounding in {len(ratios)} of {len(run.metrics)} updates"
        )
    elif told:
        seen = f"update {told['update']}: {told['what']}"
    else:
        return None
    bf16 = run.facts.get("precision") == "bf16"
    return Symptom(
        "serious",
        seen,
        (change("runtime.precision", "fp32", "to see whether rounding is to blame"),) if bf16 else (),
        "see that sampler and trainer have the same weights, temperature and positions, and no dropout; "
        "with runtime.strict=true the run stops at the first such update",
    )


def _surprise(logprobs: float, nats: float, length: float, moved: float) -> float | None:
    """A response's surprise in its entropy; None where chance or the update itself decides it."""
    entropy = nats * length
    return None if entropy < SURE or moved > SAME_ENTROPY else -logprobs / entropy


def _not_mirrored(run: RunRecord) -> Symptom | None:
    surprise = combined(run, SURPRISE, _surprise)
    if surprise is None or 1 / OFF <= surprise.middle <= OFF:
        return None
    if abs(surprise.middle - 1.0) < CERTAIN * surprise.middle_error:
        return None
    return Symptom(
        "serious",
        f"a response's surprise, −log π of its tokens, is {figure(surprise.middle)} of the entropy that they were "
        f"drawn with, in the median of {len(surprise)} updates",
        advice="sample without top-k, top-p or any other filter, at the temperature that logprobs are taken at",
    )


def _stale(run: RunRecord) -> Symptom | None:
    found = course(run, "policy/staleness", least=1)
    old = found.where(lambda age: age > 0) if found else None
    if found is None or old is None or 2 * len(old) < len(found):
        return None
    return Symptom(
        "serious" if _beyond_rounding(run) else "warning",
        f"responses come from weights up to {max(old.figures):g} updates old (update {old.highest}); so it is in "
        f"{len(old)} of {len(found)} updates, {span(old.updates)}",
        advice="give the sampler the newest weights before each update",
    )


STALE_ROLLOUTS = Rule(
    "stale_rollouts",
    "The policy that learns is no longer the one that sampled: its ratios start away from 1, and part of what the "
    "clip allows is used up before the first step.",
    ("policy/staleness", *RATIOS),
    _stale,
)

SAMPLING_NOT_MIRRORED = Rule(
    "sampling_not_mirrored",
    "Tokens are drawn from another distribution than the one that their probabilities are taken from: a filter, or "
    "another temperature. What is learnt is a policy that nobody samples from, and its KL may come out negative.",
    SURPRISE,
    _not_mirrored,
)

SAMPLER_TRAINER_MISMATCH = Rule(
    "sampler_trainer_mismatch",
    "Two computations of the same probability differ: another temperature, other positions or weights, dropout, or "
    "rounding. Every ratio, and with it every gradient and the KL, is wrong by that much.",
    tuple(RATIOS),
    _mismatch,
)
