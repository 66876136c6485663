"""Do those who sample and those who train mean the same policy?"""

from __future__ import annotations

from kedge.report.doctor.courses import combined, course, figure, span
from kedge.report.doctor.finding import Rule, Symptom
from kedge.report.doctor.remedies import change
from kedge.report.record import RunRecord

__all__ = ["MAX_RATIO", "SAMPLER_TRAINER_MISMATCH", "SAMPLING_NOT_MIRRORED", "STALE_ROLLOUTS"]

MAX_RATIO = {"fp32": 1.01, "bf16": 1.5}
"""How far rounding alone drives two probabilities of a token apart: `kedge.training.guard.MAX_RATIO`, which this layer
may not read; a test holds the two together."""

SURPRISE = ("objective/logprobs", "policy/entropy", "response/length", "policy/approx_kl")

OFF, MOST = 1.25, 0.75
"""How far a response's surprise may be from its entropy, its mean, and in how many updates it has to be further: in
sound runs the run's median is 0.95 to 1.12. Half the temperature makes it 0.5."""

SAME_ENTROPY = 0.05
"""Nats per token that an update may move the policy by: the entropy is measured while it does."""

SURE = 0.7
"""Nats of entropy below which a response is all but certain, and rare surprises make up its mean."""

RATIOS = {
    "policy/first_ratio_max": "in the first optimiser step and before it, under the same weights",
    "policy/sampler_ratio_max": "when it was trained on and when it was sampled",
}


def _worst_ratio(run: RunRecord) -> tuple[float, str, int, list[int]] | None:
    """The largest ratio beyond rounding: how large, of what, at which update, and all updates that have one."""
    bound = MAX_RATIO.get(run.facts.get("precision", ""), MAX_RATIO["bf16"])
    worst = None
    for name, when in RATIOS.items():
        found = course(run, name, least=1)
        beyond = (
            [(ratio, update) for update, ratio in zip(found.updates, found.figures, strict=True) if ratio > bound]
            if found
            else []
        )
        if beyond and (worst is None or max(beyond)[0] > worst[0]):
            worst = (*max(beyond), when, [update for _, update in beyond])
    return None if worst is None else (worst[0], worst[2], worst[1], worst[3])


def _mismatch(run: RunRecord) -> Symptom | None:
    told = next((incident for incident in run.incidents if incident.get("kind") == "mismatch"), None)
    worst = _worst_ratio(run)
    if worst is None and told is None:
        return None
    if worst is None:
        seen = f"update {told['update']}: {told['what']}" if told else ""
    else:
        ratio, when, update, updates = worst
        seen = (
            f"a token's probabilities {when} are up to {figure(ratio)} to 1, at update {update}; beyond rounding in "
            f"{len(updates)} of {len(run.metrics)} updates"
        )
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
    beyond = sum(share > OFF or share < 1 / OFF for share in surprise.figures)
    if beyond < MOST * len(surprise):
        return None
    return Symptom(
        "serious",
        f"a response's surprise, −log π of its tokens, is {figure(surprise.middle)} of the entropy that they were "
        f"drawn with; out of proportion in {beyond} of {len(surprise)} updates",
        advice="sample without top-k, top-p or any other filter, at the temperature that logprobs are taken at",
    )


def _stale(run: RunRecord) -> Symptom | None:
    found = course(run, "policy/staleness", least=1)
    old = [(age, update) for update, age in zip(found.updates, found.figures, strict=True) if age > 0] if found else []
    if not found or 2 * len(old) < len(found):
        return None
    age, update = max(old)
    return Symptom(
        "serious" if _worst_ratio(run) else "warning",
        f"responses come from weights up to {age:g} updates old (update {update}); so it is in {len(old)} of "
        f"{len(found)} updates, {span([update for _, update in old])}",
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
