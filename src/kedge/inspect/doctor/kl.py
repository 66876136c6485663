"""The KL penalty: how far the policy is from the reference, and what that costs."""

from __future__ import annotations

from collections.abc import Iterator

from kedge.inspect.doctor.finding import Remedy, Rule, Symptom
from kedge.inspect.doctor.needs import Needs
from kedge.inspect.doctor.remedies import scale, set_to
from kedge.inspect.doctor.responses import selected_by_score
from kedge.inspect.doctor.steps import smaller_rate
from kedge.inspect.doctor.trends import MIN_LEVEL, MIN_TREND, SIGNIFICANT, Series, fmt, read, rose
from kedge.inspect.record import RunRecord
from kedge.inspect.resolved import charges_kl

__all__ = ["BETA_TOO_LARGE", "BETA_TOO_SMALL", "KL_EXPLODING", "KL_NEGATIVE", "KL_SIGN_FLIPPED"]

BELOW_ZERO = -0.1
"""Nats per response: near 0 the estimate is pure noise and may be slightly negative."""

WRONG_SIGN = 0.01
"""KL reward, in standard deviations of the score, that is more than rounding."""

FAR_PER_TOKEN, TOO_FAR_PER_TOKEN = 0.5, 1.0
"""KL to the reference, nats per token: at 1 the policy makes each token e times as likely as the reference does. The
demo ends at 0.08, story runs of 60 updates at 0.2 to 0.5, and runs that broke at 1.2 or more."""

FAR, TOO_FAR = 10.0, 20.0
"""The same per response. Short responses can be memorized within few nats, which is not a problem."""

EXTREME = 2.0
"""Multiple of these limits that needs no history."""

OFF_TARGET = 3.0
"""KL relative to its controller's target at which the controller has lost control."""

NEGLIGIBLE = 0.05
"""Cost of the KL, relative to the gain in score, at which it has no influence. The demo pays 0.15, N+ about as much."""

DRIFTED = 5.0
"""Nats per response from which a negligible cost matters."""

LITTLE_TO_GAIN = 0.5
"""What the best policy under β gains, in standard deviations of the score. To first order that is the scores' standard
deviation over β, since the mean score under π_ref·exp(score/β) is higher by Var(score)/β."""


def _sign_flipped(run: RunRecord) -> Symptom | None:
    reward, kl, score_std = (read(run, name) for name in ("reward/kl", "objective/kl", "reward/score_std"))
    if reward is None or kl is None or score_std is None:
        return None
    if run.setting("ppo.kl_in") == "loss" or kl.late <= 0 or reward.late >= -WRONG_SIGN * score_std.early:
        return None
    return Symptom(
        "serious",
        f"a KL of {fmt(kl.late)} nats adds {fmt(-reward.late)} to the reward of a response ({reward.late_span}); it "
        "should reduce it",
        advice="fix the sign in the code (no setting causes this): reward = score − β·KL",
    )


def _negative(run: RunRecord) -> Symptom | None:
    kl = read(run, "objective/kl")
    if kl is None or selected_by_score(run) or kl.late > BELOW_ZERO or kl.late > -SIGNIFICANT * kl.rise_error:
        return None
    return Symptom(
        "serious",
        f"the KL is {fmt(kl.late)} nats per response ({kl.late_span}), and negative in "
        f"{sum(value < 0 for value in kl.values)} of {len(kl)} updates",
        advice="check that responses are sampled from the policy whose logprobs are used (no top-k or top-p, same "
        "temperature), that the mask includes the stop token and no padding, and that the KL is log π − log π_ref",
    )


def _exploding(run: RunRecord) -> Symptom | None:
    kl, per_token = read(run, "objective/kl"), _per_token(run)
    if kl is None or per_token is None:
        return _far_at_once(run)
    target = run.setting("ppo.kl_target") if _is_controlled(run) else None
    far = kl.late > FAR and per_token > FAR_PER_TOKEN
    off_target = target is not None and len(kl) >= MIN_TREND and kl.late > max(OFF_TARGET * target, FAR)
    if not (far or off_target):
        return None
    loss = _net_loss(run)
    return Symptom(
        "serious" if loss or (kl.late > TOO_FAR and per_token > TOO_FAR_PER_TOKEN) else "warning",
        f"the policy is {fmt(kl.late)} nats per response away from the reference ({kl.late_span}), {fmt(per_token)} "
        "per token" + (f"; the controller's target is {target:g} per response" if off_target else "") + loss,
        tuple(_hold_back(run, kl)),
    )


def _far_at_once(run: RunRecord) -> Symptom | None:
    """A KL that the first updates have made so large that no later one is needed to judge it."""
    kl, length = read(run, "objective/kl", at_least=2), read(run, "response/length", at_least=2)
    if kl is None or length is None:
        return None
    latest = kl.values[-1]
    per_token = latest / max(length.values[-1], 1.0)
    if latest <= EXTREME * max(TOO_FAR, kl.first) or per_token <= EXTREME * TOO_FAR_PER_TOKEN:
        return None
    return Symptom(
        "serious",
        f"the policy is {fmt(latest)} nats per response away from the reference in update {kl.updates[-1]}, "
        f"{fmt(per_token)} per token, and was {fmt(kl.first)} away in update {kl.updates[0]}",
        (smaller_rate(run, clipped=0.0, moved=per_token, most=1 / 3),),
    )


def _net_loss(run: RunRecord) -> str:
    """States that the policy pays more for its KL than its score has gained; empty if it does not."""
    name, metric = ("score minus KL cost", "reward/total") if charges_kl(run) else ("the score", "reward/score_mean")
    total, score_std = read(run, metric, at_least=MIN_TREND), read(run, "reward/score_std")
    if total is None or score_std is None:
        return ""
    if total.late >= total.first - max(score_std.first, SIGNIFICANT * total.rise_error):
        return ""
    return f"; {name} has fallen from {fmt(total.first)} to {fmt(total.late)}"


def _hold_back(run: RunRecord, kl: Series) -> Iterator[Remedy]:
    """Smaller steps if the KL jumped, a larger β if it crept up."""
    jumped = kl.values[min(len(kl) - 1, 3)] > kl.late / 2
    # The ratios of an update with a single step are 1: the KL alone shows how large its steps are.
    drift = (_per_token(run) or 0.0) if jumped else 0.0
    rate = smaller_rate(run, clipped=0.0, moved=drift if drift > EXTREME * TOO_FAR_PER_TOKEN else 0.0, most=1 / 3)
    remedies = (rate, scale(run, "ppo.kl_coef", 3.0))
    yield from remedies if jumped else reversed(remedies)


def _beta_too_small(run: RunRecord) -> Symptom | None:
    score, kl, score_std = (
        read(run, name, at_least=MIN_TREND) for name in ("reward/score_mean", "objective/kl", "reward/score_std")
    )
    beta = read(run, "objective/kl_coef")
    if score is None or kl is None or score_std is None or beta is None or kl.late < DRIFTED or not rose(kl):
        return None
    cost, gain = beta.late * kl.late, max(score.rise, score_std.early)
    if cost > NEGLIGIBLE * gain:
        return None
    return Symptom(
        "serious" if (_per_token(run) or 0.0) > FAR_PER_TOKEN and kl.late > FAR else "warning",
        f"the KL has grown from {fmt(kl.early)} to {fmt(kl.late)} nats per response ({kl.late_span}); at β = "
        f"{beta.late:g} that costs {fmt(cost)}, while the score has gained {fmt(score.rise)}",
        # At this β the first nats of a drift cost a quarter of what the score has gained.
        (set_to(run, "ppo.kl_coef", float(f"{gain / DRIFTED / 4:.2g}"), "too_low"),),
    )


def _per_token(run: RunRecord) -> float | None:
    """Late KL in nats per token."""
    kl, length = read(run, "objective/kl"), read(run, "response/length")
    return kl.late / max(length.late, 1.0) if kl and length else None


def _is_controlled(run: RunRecord) -> bool:
    return run.setting("ppo.kl_controller") in ("ziegler", "schulman")


def _beta_too_large(run: RunRecord) -> Symptom | None:
    score, score_std = (read(run, name, at_least=MIN_TREND) for name in ("reward/score_mean", "reward/score_std"))
    beta = read(run, "objective/kl_coef")
    if score is None or score_std is None or beta is None or beta.late <= 0 or score_std.first <= 0:
        return None
    reach = score_std.first / beta.late
    if reach > LITTLE_TO_GAIN or score.late - score.first > LITTLE_TO_GAIN * score_std.first:
        return None
    return Symptom(
        "serious",
        f"β is {fmt(beta.late)} and the scores' standard deviation {fmt(score_std.first)}, so the best policy can gain "
        f"only about {fmt(score_std.first**2 / beta.late)}; the mean score went from {fmt(score.first)} to "
        f"{fmt(score.late)} ({score.late_span})",
        (
            scale(run, "ppo.kl_target", 3.0)
            if _is_controlled(run)
            # As in the demo, whose scores have a standard deviation of 1.
            else set_to(run, "ppo.kl_coef", float(f"{score_std.first / 10:.2g}"), "too_high"),
        ),
    )


KL_SIGN_FLIPPED = Rule(
    "kl_sign_flipped",
    "The KL term enters the reward with the wrong sign: the policy is rewarded for moving away from the reference.",
    ("reward/kl", "objective/kl", "reward/score_std"),
    _sign_flipped,
    Needs(
        ("reward/kl", "objective/kl", "reward/score_std"),
        MIN_LEVEL,
        fits=lambda run: run.setting("ppo.kl_in") != "loss",
    ),
)

KL_NEGATIVE = Rule(
    "kl_negative",
    "A KL divergence cannot be negative. If its estimate is, update after update, the responses were not sampled from "
    "the policy whose logprobs are used: a sampling filter, another temperature, a wrong mask or a flipped sign.",
    ("objective/kl", "reward/unscored"),
    _negative,
    Needs(("objective/kl",), MIN_LEVEL, lacks=selected_by_score),
)

BETA_TOO_LARGE = Rule(
    "beta_too_large",
    "The KL penalty is so strong that even the best policy it allows stays next to the reference: there is almost no "
    "score to gain, and most of the gradient is noise from the KL.",
    ("reward/score_mean", "reward/score_std", "objective/kl_coef"),
    _beta_too_large,
    Needs(("reward/score_mean", "reward/score_std"), MIN_TREND, fits=lambda run: run.setting("ppo.kl_coef") != 0),
)

BETA_TOO_SMALL = Rule(
    "beta_too_small",
    "The KL penalty is negligible, so nothing keeps the policy near the reference: it drifts toward whatever the "
    "reward favors, regardless of the quality of the text.",
    ("reward/score_mean", "reward/score_std", "objective/kl", "objective/kl_coef", "response/length"),
    _beta_too_small,
    Needs(("reward/score_mean", "reward/score_std", "objective/kl"), MIN_TREND),
)

KL_EXPLODING = Rule(
    "kl_exploding",
    "The policy now writes text that the reference would almost never produce. A reward model has seen nothing like "
    "it, so its scores can no longer be trusted.",
    ("objective/kl", "response/length", "reward/total", "reward/score_mean", "reward/score_std"),
    _exploding,
    Needs(("objective/kl", "response/length"), MIN_LEVEL),
)
