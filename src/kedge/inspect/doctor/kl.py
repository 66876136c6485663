"""The leash: how far the policy is from the reference, and what that costs it."""

from __future__ import annotations

from collections.abc import Iterator

from kedge.inspect.doctor.courses import CERTAIN, TREND, Course, course, figure, rose
from kedge.inspect.doctor.finding import Remedy, Rule, Symptom
from kedge.inspect.doctor.remedies import scale
from kedge.inspect.record import RunRecord

__all__ = ["BETA_TOO_LARGE", "BETA_TOO_SMALL", "KL_EXPLODING", "KL_NEGATIVE", "KL_SIGN_FLIPPED"]

BELOW_ZERO = -0.1
"""Nats per response that the KL's estimate may come out negative near 0, where a batch's mean is all noise."""

WRONG_SIGN = 0.01
"""Cost of the KL, in standard deviations of the score, from which its sign is no rounding."""

FAR_PER_TOKEN, TOO_FAR_PER_TOKEN = 0.5, 1.0
"""KL to the reference, nats per token: at 1 each token is e times as likely to the policy as to the reference. The demo
ends at 0.08, runs of 60 updates on stories at 0.2 to 0.5, runs that broke at 1.2 and more."""

FAR, TOO_FAR = 10.0, 20.0
"""The same per response. Short responses can be learnt by heart, which takes few nats and is no fault."""

OFF = 3.0
"""KL in its controller's target, at which the controller has lost it."""

NEGLIGIBLE = 0.05
"""Cost of the KL, in what the score has gained, at which it decides nothing. The demo pays 0.15, N+ about as much."""

DRIFTED = 5.0
"""Nats per response from which that matters."""

LITTLE_TO_GAIN = 0.5
"""What the best policy under β gains, in standard deviations of the score: to first order their spread over β, since
the mean score under π_ref·exp(score/β) is higher by Var(score)/β."""


def _sign_flipped(run: RunRecord) -> Symptom | None:
    cost, drift, spread = (course(run, name) for name in ("reward/kl", "objective/kl", "reward/score_std"))
    if cost is None or drift is None or spread is None or run.setting("ppo.whiten_rewards"):
        return None
    if run.setting("ppo.kl_in") == "loss" or drift.late <= 0 or cost.late >= -WRONG_SIGN * spread.early:
        return None
    return Symptom(
        "serious",
        f"a response is paid {figure(-cost.late)} for its KL of {figure(drift.late)} nats ({cost.late_span}), where it "
        "should pay",
        advice="the KL enters the reward with the wrong sign: reward = score − β·KL",
    )


def _negative(run: RunRecord) -> Symptom | None:
    drift = course(run, "objective/kl")
    if drift is None or drift.late > BELOW_ZERO or drift.late > -CERTAIN * drift.error:
        return None
    below = sum(value < 0 for value in drift.figures)
    return Symptom(
        "serious",
        f"the KL is {figure(drift.late)} nats per response in {drift.late_span}, and below 0 in {below} of "
        f"{len(drift)} updates",
        advice="see that responses are sampled from the very policy whose logprobs are taken: no top-k or top-p, the "
        "same temperature, the stop token counted, padding not; and that KL is log π − log π_ref",
    )


def _exploding(run: RunRecord) -> Symptom | None:
    drift, length = course(run, "objective/kl"), course(run, "response/length")
    if drift is None or length is None:
        return None
    per_token = drift.late / max(length.late, 1.0)
    target = run.setting("ppo.kl_target") if run.setting("ppo.kl_controller") in ("ziegler", "schulman") else None
    far = drift.late > FAR and per_token > FAR_PER_TOKEN
    lost = target is not None and len(drift) >= TREND and drift.late > max(OFF * target, FAR)
    if not (far or lost):
        return None
    grave = (drift.late > TOO_FAR and per_token > TOO_FAR_PER_TOKEN) or _worse_off(run)
    return Symptom(
        "serious" if grave else "warning",
        f"the policy is {figure(drift.late)} nats per response from the reference ({drift.late_span}), "
        f"{figure(per_token)} per token"
        + (f", where the controller's target is {target:g}" if lost else "")
        + (f"; score less KL cost is lower than at first{_totals(run)}" if _worse_off(run) else ""),
        tuple(_hold(run, drift)),
    )


def _worse_off(run: RunRecord) -> bool:
    """Whether the policy pays more for its KL than its score has gained."""
    total, spread = course(run, "reward/total", least=TREND), course(run, "reward/score_std")
    if total is None or spread is None or run.setting("ppo.whiten_rewards"):
        return False
    return total.late < total.first - max(spread.first, CERTAIN * total.error)


def _totals(run: RunRecord) -> str:
    total = course(run, "reward/total")
    return "" if total is None else f": {figure(total.late)} after {figure(total.first)}"


def _hold(run: RunRecord, drift: Course) -> Iterator[Remedy]:
    """Smaller steps where it went at once, a shorter leash where it went slowly."""
    at_once = drift.figures[min(len(drift) - 1, 3)] > drift.late / 2
    remedies = (scale(run, "ppo.learning_rate", 1 / 3), scale(run, "ppo.kl_coef", 3.0))
    yield from remedies if at_once else reversed(remedies)


def _beta_too_small(run: RunRecord) -> Symptom | None:
    score, drift, spread = (
        course(run, name, least=TREND) for name in ("reward/score_mean", "objective/kl", "reward/score_std")
    )
    beta = course(run, "objective/kl_coef")
    if score is None or drift is None or spread is None or beta is None or drift.late < DRIFTED or not rose(drift):
        return None
    cost, gain = beta.late * drift.late, max(score.rise, spread.early)
    if cost > NEGLIGIBLE * gain:
        return None
    per_token = _per_token(run, drift)
    return Symptom(
        "serious" if per_token > FAR_PER_TOKEN and drift.late > FAR else "warning",
        f"at β = {beta.late:g} the {figure(drift.late)} nats from the reference ({drift.late_span}) cost "
        f"{figure(cost)}, while the score has gained {figure(score.rise)}; at first the KL was {figure(drift.early)}",
        (_beta_for(run, gain),),
    )


def _per_token(run: RunRecord, drift: Course) -> float:
    length = course(run, "response/length")
    return drift.late / max(length.late, 1.0) if length else 0.0


def _beta_for(run: RunRecord, gain: float) -> Remedy:
    """A β at which the first nats of a drift cost a quarter of what the score has gained."""
    present = run.setting("ppo.kl_coef")
    was = f" instead of {present:g}" if isinstance(present, (int, float)) else ""
    return Remedy("ppo.kl_coef", "too_low", f"ppo.kl_coef={gain / DRIFTED / 4:.2g}{was}")


def _beta_too_large(run: RunRecord) -> Symptom | None:
    score, spread = course(run, "reward/score_mean", least=TREND), course(run, "reward/score_std", least=TREND)
    beta = course(run, "objective/kl_coef")
    if score is None or spread is None or beta is None or beta.late <= 0 or spread.first <= 0:
        return None
    reach = spread.first / beta.late
    if reach > LITTLE_TO_GAIN or score.late - score.first > LITTLE_TO_GAIN * spread.first:
        return None
    controlled = run.setting("ppo.kl_controller") in ("ziegler", "schulman")
    return Symptom(
        "serious",
        f"β is {figure(beta.late)} where scores spread by {figure(spread.first)}: the best policy under it gains about "
        f"{figure(spread.first**2 / beta.late)}, and the mean score went from {figure(score.first)} to "
        f"{figure(score.late)} ({score.late_span})",
        (scale(run, "ppo.kl_target", 3.0),) if controlled else (_smaller_beta(run, spread),),
    )


def _smaller_beta(run: RunRecord, spread: Course) -> Remedy:
    """A tenth of the scores' spread: the demo's, whose scores spread by 1."""
    return Remedy(
        "ppo.kl_coef", "too_high", f"ppo.kl_coef={spread.first / 10:.2g} instead of {run.setting('ppo.kl_coef')}"
    )


KL_SIGN_FLIPPED = Rule(
    "kl_sign_flipped",
    "The policy is paid for leaving the reference.",
    ("reward/kl", "objective/kl", "reward/score_std"),
    _sign_flipped,
)

KL_NEGATIVE = Rule(
    "kl_negative",
    "A KL cannot be negative. Where its estimate is, again and again, the responses were not drawn from the policy "
    "whose probabilities they are given: a sampling filter, another temperature, a mask that is off, or a sign.",
    ("objective/kl",),
    _negative,
)

BETA_TOO_LARGE = Rule(
    "beta_too_large",
    "The leash is so short that the best policy it allows is next to the reference: there is nothing to be gained, "
    "and most of the gradient is the KL's own noise.",
    ("reward/score_mean", "reward/score_std", "objective/kl_coef"),
    _beta_too_large,
)

BETA_TOO_SMALL = Rule(
    "beta_too_small",
    "The KL costs next to nothing, and the policy drifts on: into what the reward likes, whatever the text is like.",
    ("reward/score_mean", "reward/score_std", "objective/kl", "objective/kl_coef", "response/length"),
    _beta_too_small,
)

KL_EXPLODING = Rule(
    "kl_exploding",
    "The policy has left what the reference would ever write, which is where a reward model knows anything.",
    ("objective/kl", "response/length", "reward/total", "reward/score_std"),
    _exploding,
)
