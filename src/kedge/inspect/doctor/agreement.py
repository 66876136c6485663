"""Whether sampler and trainer compute the same policy."""

from __future__ import annotations

from kedge.inspect.doctor.finding import Rule, Symptom
from kedge.inspect.doctor.needs import Needs
from kedge.inspect.doctor.remedies import set_to
from kedge.inspect.doctor.responses import selected_by_score
from kedge.inspect.doctor.trends import MIN_LEVEL, SIGNIFICANT, Series, combine, fmt, read, span
from kedge.inspect.record import RunRecord

__all__ = ["MAX_RATIO", "SAMPLER_TRAINER_MISMATCH", "SAMPLING_NOT_MIRRORED", "STALE_ROLLOUTS"]

MAX_RATIO = {"fp32": 1.01, "bf16": 1.5}
"""Largest ratio of two probabilities of one token that rounding explains. A copy of `training.guard.guard.MAX_RATIO`,
which this layer may not import; a test keeps the two equal."""

SURPRISAL_METRICS = ("objective/logprobs", "policy/entropy", "response/length", "policy/approx_kl")

OFF = 1.15
"""Factor between a response's surprisal and its entropy, which is the expected surprisal. The median of a sound run is
0.95 to 1.12. Sampling at half the temperature gives 0.5 if the policy is sure of most tokens, 0.8 if it is not."""

MAX_MOVED = 0.05
"""Nats per token an update may move the policy by: the entropy is measured while it moves."""

MIN_ENTROPY = 0.7
"""Nats. Responses with less entropy are nearly deterministic, and rare events dominate their mean surprisal."""

RATIOS = {
    "policy/first_ratio_max": "the old logprobs and the first optimizer step, which has the same weights",
    "policy/sampler_ratio_max": "sampler and trainer",
}


def _beyond_rounding(run: RunRecord) -> tuple[str, Series] | None:
    """A description of the comparison with the largest ratio, and its ratios that rounding does not explain."""
    bound = MAX_RATIO.get(run.facts.get("precision", ""), MAX_RATIO["bf16"])
    measured = {between: read(run, name, at_least=1) for name, between in RATIOS.items()}
    if run.setting("rollout.max_staleness") and (fresh := read(run, "policy/staleness", at_least=1)):
        # Other weights have other probabilities: only updates that their own weights sampled are compared.
        last = max(fresh.where(lambda age: age == 0).updates, default=0)
        names = ["policy/sampler_ratio_max"]
        if run.setting("ppo.old_logprobs") == "sampler":
            names.append("policy/first_ratio_max")
        for between in (RATIOS[name] for name in names):
            if ratios := measured[between]:
                measured[between] = ratios.until(last)
    beyond = {between: ratios.where(lambda ratio: ratio > bound) for between, ratios in measured.items() if ratios}
    apart = {between: ratios for between, ratios in beyond.items() if len(ratios)}
    return max(apart.items(), key=lambda item: max(item[1].values)) if apart else None


def _mismatch(run: RunRecord) -> Symptom | None:
    incident = next((incident for incident in run.incidents if incident.get("kind") == "mismatch"), None)
    if beyond := _beyond_rounding(run):
        between, ratios = beyond
        seen = (
            f"a token's probability differs by up to a factor of {fmt(max(ratios.values))} between {between} (update "
            f"{ratios.argmax}); beyond rounding in {len(ratios)} of {len(run.metrics)} updates"
        )
    elif incident:
        seen = f"update {incident['update']}: {incident['what']}"
    else:
        return None
    bf16 = run.facts.get("precision") == "bf16"
    return Symptom(
        "serious",
        seen,
        (set_to(run, "runtime.precision", "fp32", why="to see whether rounding is the cause"),) if bf16 else (),
        "check that sampler and trainer use the same weights, temperature and position ids, and that dropout is off; "
        "runtime.strict=true stops the run at the first mismatch",
    )


def _surprisal_ratio(logprobs: float, nats: float, length: float, moved: float) -> float | None:
    """Surprisal relative to entropy; None if chance or the update itself dominates it."""
    entropy = nats * length
    return None if entropy < MIN_ENTROPY or moved > MAX_MOVED else -logprobs / entropy


def _not_mirrored(run: RunRecord) -> Symptom | None:
    ratio = combine(run, SURPRISAL_METRICS, _surprisal_ratio)
    if ratio is None or selected_by_score(run) or 1 / OFF <= ratio.overall <= OFF:
        return None
    if abs(ratio.overall - 1.0) < SIGNIFICANT * ratio.overall_error:
        return None
    return Symptom(
        "serious",
        f"−log π of a response is {fmt(ratio.overall)} times its entropy (median of {len(ratio)} updates; 1 is "
        "expected)",
        advice="sample without top-k, top-p or any other filter, at the temperature used for the logprobs",
    )


def _stale(run: RunRecord) -> Symptom | None:
    staleness = read(run, "policy/staleness", at_least=1)
    asked = run.setting("rollout.max_staleness") or 0
    stale = staleness.where(lambda age: age > asked) if staleness else None
    if staleness is None or stale is None or 2 * len(stale) < len(staleness):
        return None
    oldest = max(stale.values)
    return Symptom(
        "serious" if _beyond_rounding(run) else "warning",
        f"responses were sampled with weights up to {oldest:g} update{'s' if oldest != 1 else ''} old (update "
        f"{stale.argmax}); stale in {len(stale)} of {len(staleness)} updates ({span(stale.updates)})",
        advice="copy the newest weights to the sampler before each update",
    )


STALE_ROLLOUTS = Rule(
    "stale_rollouts",
    "The responses come from an older policy than the one being trained. Ratios start away from 1, so part of the clip "
    "range is used up before the first optimizer step.",
    ("policy/staleness", *RATIOS),
    _stale,
    Needs(("policy/staleness",)),
)

SAMPLING_NOT_MIRRORED = Rule(
    "sampling_not_mirrored",
    "Tokens are drawn from a different distribution than the one their logprobs come from: a top-k or top-p filter, or "
    "a different temperature. The policy being trained is not the policy being sampled, and its KL may turn negative.",
    (*SURPRISAL_METRICS, "reward/unscored"),
    _not_mirrored,
    Needs(SURPRISAL_METRICS, MIN_LEVEL, lacks=selected_by_score),
)

SAMPLER_TRAINER_MISMATCH = Rule(
    "sampler_trainer_mismatch",
    "Sampler and trainer compute different probabilities for the same tokens: different temperature, position ids or "
    "weights, active dropout, or rounding. Every ratio, every gradient and the KL are wrong by that factor.",
    tuple(RATIOS),
    _mismatch,
    Needs(("|".join(RATIOS),)),
)
