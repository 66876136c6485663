"""KL penalty and exploration: the distance from the reference, and the variety of responses."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from kedge_inspect.doctor.rule import SMALLER_STEPS, Remedy, Symptom, rule, scale, set_to
from kedge_inspect.doctor.series import (
    MIN_LEVEL,
    MIN_TREND,
    SIGNIFICANT,
    WINDOW,
    Series,
    combine,
    fmt,
    read,
    rose,
    span,
)
from kedge_inspect.doctor.steps import clips_sequences, larger_steps, smaller_rate
from kedge_inspect.record import RunRecord, is_number
from kedge_inspect.resolved import charges_kl, estimator_facts, has_kl_in_loss, learns_from_teacher, weighs_scores

FAR_PER_TOKEN = 0.5
TOO_FAR_PER_TOKEN = 1.0
"""Thresholds of a warning and of a serious finding: the KL to the reference, in nats per token. At 1 the policy makes
each token e times as likely as the reference does. The demo ends at 0.08, story runs of 60 updates at 0.2 to 0.5, and
runs that broke at 1.2 or more."""

FAR = 10.0
TOO_FAR = 20.0
"""Thresholds of a warning and of a serious finding: the KL to the reference, in nats per response; the KL per token
must also exceed its threshold. Short responses can be memorized within few nats, which is not a problem."""

EXTREME = 2.0
"""Multiple of `TOO_FAR` and `TOO_FAR_PER_TOKEN` that is a finding without any history."""

OFF_TARGET = 3.0
"""KL relative to its controller's target at which the controller has lost control."""

NEGLIGIBLE = 0.05
"""Cost of the KL, relative to the gain in score, at which it has no influence. The demo pays 0.15, N+ about as much."""

LOWER_TARGET = scale("ppo.kl_controller.target", 1 / 3)

DRIFTED = 5.0
"""KL in nats per response from which a negligible cost matters."""

LITTLE_TO_GAIN = 0.5
"""Gain of the best policy under β, in standard deviations of the score. To first order that is the scores' standard
deviation over β, since the mean score under π_ref·exp(score/β) is higher by Var(score)/β."""


def stronger_kl(run: RunRecord, coefficient: Remedy = scale("ppo.kl_coef", 3.0)) -> Iterator[Remedy]:
    """Raise β; also move the KL into the loss for an advantage without which its configuration is rejected."""
    yield coefficient
    if estimator_facts(run).divides and not has_kl_in_loss(run):
        yield set_to("ppo.kl_in", "loss", why=f"which ppo.advantage={run.choice('ppo.advantage')} needs")


def _far_at_once(run: RunRecord) -> Symptom | None:
    """Symptom of a KL that is already too large after the first updates."""
    kl = read(run, "objective/kl", at_least=2)
    length = read(run, "response/length", at_least=2)
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
        (smaller_rate(moved=per_token),),
    )


@rule(
    "The policy now writes text that the reference would almost never produce. A reward model has seen nothing like "
    "it, so its scores can no longer be trusted.",
    needs=("objective/kl", "response/length"),
    early=_far_at_once,
    updates=MIN_LEVEL,
    of_policy=True,
    of_reward=True,
)
def kl_exploding(run: RunRecord, kl: Series, length: Series) -> Symptom | None:
    """Seen: `objective/kl` is high per response and per token, or far above its controller's target.

    Try: Lower `ppo.learning_rate` to a third if the KL jumped in the first updates; triple `ppo.kl_coef` if it crept
    up, or lower the `ppo.kl_controller.target` to which a controller holds it.

    Threshold: Above 10 nats per response and 0.5 nats per token (short responses can be memorized within few nats), or
    above 10 nats and three times `ppo.kl_controller.target`. Serious above 20 nats and 1 nat per token, or if score
    minus KL cost has fallen by a standard deviation of the scores. The demo ends at 0.08 nats per token, good story
    runs at 0.2 to 0.5, and broken ones at 1.2 or more.
    """
    per_token = kl.late / max(length.late, 1.0)
    move, error = kl.since(1)
    if run.setting("ppo.reference") is not None and move <= SIGNIFICANT * error:
        return None  # the policy did not start at the reference, and has not moved away from it
    target = _target(run)
    far = kl.late > FAR and per_token > FAR_PER_TOKEN
    off_target = target is not None and len(kl) >= MIN_TREND and kl.late > max(OFF_TARGET * target, FAR)
    if not (far or off_target):
        return None
    loss = _net_loss(run)
    return Symptom(
        "serious" if loss or (kl.late > TOO_FAR and per_token > TOO_FAR_PER_TOKEN) else "warning",
        f"the policy is {fmt(kl.late)} nats per response away from the reference ({kl.late_span}), {fmt(per_token)} "
        "per token" + (f"; the controller's target is {target:g} per response" if off_target else "") + loss,
        _hold_back(run, kl, per_token),
    )


NOT_CLOSER = 0.9
FARTHER = 1.1
"""KL to the teacher per token, relative to the first update, at which the policy has not moved, or has moved away. The
students of docs/family.md are at about half after the twelve updates that the rule waits for.
"""

CLOSE = 0.01
"""KL in nats per token at which the policy equals the teacher, except for rounding and the noise of the estimate."""

PATIENCE = 12


@rule(
    "The policy does not come closer to its teacher: its steps are too small or too noisy; or so large that they break "
    "it.",
    needs=("objective/kl", "response/length"),
    updates=PATIENCE,
    of_policy=True,
    fits=learns_from_teacher,
)
def teacher_not_approached(run: RunRecord, kl: Series, length: Series) -> Symptom | None:
    """Seen: `objective/kl`, which is the reverse KL to the teacher in a run without a reward, does not fall.

    Try: If it stays, triple `ppo.learning_rate` if the steps are small, as for [reward_flat](#reward_flat), and double
    `rollout.num_prompts`. If it rises, lower `ppo.learning_rate` to a third.

    Threshold: After 12 updates more than 0.9 of the first update's KL per token is a warning, and more than 1.1 of it
    serious; nothing below 0.01 nats per token.
    """
    distance = combine(lambda nats, tokens: nats / max(tokens, 1.0), kl, length)
    if distance is None:
        return None
    left = distance.late / max(distance.first, CLOSE)
    if left <= NOT_CLOSER:
        return None
    return Symptom(
        "serious" if left > FARTHER else "warning",
        f"the KL to the teacher is {fmt(distance.first)} nats per token in update {distance.updates[0]} and "
        f"{fmt(distance.late)} in {distance.late_span}",
        (SMALLER_STEPS,) if left > FARTHER else (*larger_steps(run), scale("rollout.num_prompts", 2.0)),
    )


def _net_loss(run: RunRecord) -> str:
    """Describe a policy whose KL costs more than its score has gained; empty otherwise."""
    name, metric = ("score minus KL cost", "reward/total") if charges_kl(run) else ("the score", "reward/score_mean")
    total = read(run, metric, at_least=MIN_TREND)
    score_std = read(run, "reward/score_std")
    if total is None or score_std is None:
        return ""
    move, error = total.since(1)
    if -move <= max(score_std.start, SIGNIFICANT * error):
        return ""
    return f"; {name} has fallen from {fmt(total.first)} to {fmt(total.late)}"


def _hold_back(run: RunRecord, kl: Series, per_token: float) -> tuple[Remedy, ...]:
    """Suggest smaller steps if the KL jumped, or a larger β if it crept up."""
    target = _target(run)
    # Far from its target, a controller needs a different initial β; near it, it would undo the change.
    stronger = stronger_kl(run) if target is None or kl.late > OFF_TARGET * target else (LOWER_TARGET,)
    if kl.values[min(len(kl) - 1, 3)] <= kl.late / 2:
        return *stronger, SMALLER_STEPS
    # The ratios of an update with a single step are 1: the KL alone shows how large its steps are.
    return smaller_rate(moved=per_token if per_token > EXTREME * TOO_FAR_PER_TOKEN else 0.0), *stronger


def _lacks_beta(run: RunRecord) -> str:
    """A log of another library may lack the coefficient, and its settings."""
    known = run.trainer is None or run.setting("ppo.kl_coef") is not None or run.series("objective/kl_coef")[0]
    return "" if known else "β is not known"


@rule(
    "The KL penalty is negligible, so nothing keeps the policy near the reference: it drifts toward anything that the "
    "reward favors, regardless of the quality of the text.",
    needs=("reward/score_mean", "reward/score_std", "objective/kl"),
    updates=MIN_TREND,
    lacks=_lacks_beta,
)
def beta_too_small(run: RunRecord, score: Series, score_std: Series, kl: Series) -> Symptom | None:
    """Seen: `objective/kl` keeps rising, and β times the KL is negligible compared with the gain in score.

    Try: Set `ppo.kl_coef` to the suggested value, at which 5 nats cost a quarter of the gain, for GRPO and GiGPO with
    `ppo.kl_in=loss`; with a KL controller, lower `ppo.kl_controller.target` to a third.

    Threshold: At least 5 nats per response at a cost of at most a twentieth of the gain (or of the scores' standard
    deviation, if that is larger); the demo and N+ pay about 0.15. A warning; serious above 10 nats per response and 0.5
    nats per token. Not with a β in the loss and whitened, GRPO's or GiGPO's advantages, whose size is not the scores'.
    """
    beta = read(run, "objective/kl_coef")
    length = read(run, "response/length")
    if beta is None or kl.late < DRIFTED or not rose(kl) or (beta.late > 0 and not weighs_scores(run)):
        return None
    cost = beta.late * kl.late
    far = length is not None and kl.late / max(length.late, 1.0) > FAR_PER_TOKEN and kl.late > FAR
    gain = max(score.rise, score_std.early)
    if cost > NEGLIGIBLE * gain:
        return None
    return Symptom(
        "serious" if far else "warning",
        f"the KL has grown from {fmt(kl.early)} to {fmt(kl.late)} nats per response ({kl.late_span}); at β = "
        f"{beta.late:g} that costs {fmt(cost)}, while the score has gained {fmt(score.rise)}",
        _charge_for_drift(run, gain),
    )


def _charge_for_drift(run: RunRecord, gain: float) -> Iterable[Remedy]:
    if _target(run) is not None:
        return (LOWER_TARGET,)
    if gain <= 0:  # constant scores
        return stronger_kl(run)
    # Choose β so that a drift of `DRIFTED` nats costs a quarter of the gain. With normalized advantages, count the gain
    # as 1.
    worth = 1.0 if estimator_facts(run).divides or not weighs_scores(run) else gain
    return stronger_kl(run, set_to("ppo.kl_coef", float(f"{worth / DRIFTED / 4:.2g}"), "too_low"))


def _target(run: RunRecord) -> float | None:
    """The KL to which a controller holds the policy; None without one."""
    is_controlled = run.choice("ppo.kl_controller") not in ("", "fixed")
    return run.setting("ppo.kl_controller.target") if is_controlled else None


@rule(
    "The KL penalty is so strong that even the best policy it allows stays next to the reference: there is almost no "
    "score to gain, and most of the gradient is noise from the KL.",
    needs=("reward/score_mean", "reward/score_std"),
    updates=MIN_TREND,
    fits=lambda run: run.setting("ppo.kl_coef") != 0 and (weighs_scores(run) or run.trainer is not None),
    lacks=_lacks_beta,
)
def beta_too_large(run: RunRecord, score: Series, score_std: Series) -> Symptom | None:
    """Seen: Β (`objective/kl_coef`) is large compared with `reward/score_std`, and the score barely rises.

    Try: Set `ppo.kl_coef` to a tenth of the scores' standard deviation, as suggested; with a KL controller, triple
    `ppo.kl_controller.target`.

    Threshold: Β above twice the standard deviation of the scores, and a gain below half of it; to first order the best
    policy gains the scores' variance divided by β. Serious. Not with the KL in the loss and whitened, GRPO's or
    GiGPO's advantages, whose size is not the scores'; in a log of another library, these count as having a standard
    deviation of 1.
    """
    beta = read(run, "objective/kl_coef")
    spread = score_std.start
    if beta is None or beta.late <= 0 or spread <= 0:
        return None
    weighed = spread if weighs_scores(run) else 1.0
    if weighed > LITTLE_TO_GAIN * beta.late or score.late - score.first > LITTLE_TO_GAIN * spread:
        return None
    return Symptom(
        "serious",
        f"β is {fmt(beta.late)} and the scores' standard deviation {fmt(spread)}, so the best policy can gain "
        f"only about {fmt(spread * weighed / beta.late)}; the mean score went from {fmt(score.first)} to "
        f"{fmt(score.late)} ({score.late_span})",
        (
            scale("ppo.kl_controller.target", 3.0)
            if _target(run) is not None
            # As in the demo, whose scores have a standard deviation of 1.
            else set_to("ppo.kl_coef", float(f"{weighed / 10:.2g}"), "too_high"),
        ),
    )


TWO_RESPONSES = math.log(2.0)
THREE_RESPONSES = math.log(3.0)
"""Entropy of a whole response, in nats, that corresponds to two or three likely responses per prompt (exp of it). PPO
learns from what is better than the rest; with one likely response it learns nothing."""

COLLAPSED = 0.1
COLLAPSING = 0.2
SETTLING = 0.5
"""Entropy relative to its start. It falls in every run that learns: to 0.4 in the demo, and to 0.36 in the most
aggressive of the story runs that ended well."""

FEW_CONSTANT = 0.5
"""Share of prompts whose responses score alike below which most of them still teach something."""

CLIP_HIGHER = 0.28
"""DAPO's ε for ratios above 1 of single tokens, where PPO's is 0.2 on both sides."""

NOTHING = 0.01
"""Entropy relative to its start within too few updates for a trend, or of a policy that the steps have wrecked."""

DOUBLED = 2.0
RISEN = 1.3
"""Thresholds of a serious finding (with an entropy bonus) and of a warning: the entropy, relative to its start. Healthy
runs stay below 1.1."""

RISEN_NATS = 0.1
"""Smallest rise, in nats per token: doubling a tiny KL is harmless."""


def _of_responses(run: RunRecord, at_least: int = MIN_TREND) -> Series | None:
    """Entropy of whole responses, in nats: as other libraries record it, or that of a token times the length."""
    recorded = read(run, "response/entropy", at_least=at_least)
    nats = read(run, "policy/entropy", at_least=at_least)
    length = read(run, "response/length", at_least=at_least)
    if recorded is not None or nats is None or length is None:
        return recorded
    return combine(lambda each, tokens: each * tokens, nats, length)


@rule(
    "All responses to a prompt are nearly identical. None scores better than another, so there is nothing to learn "
    "from.",
    needs=("policy/entropy|response/entropy", "response/length|response/entropy"),
    updates=MIN_TREND,
    of_reward=True,
)
def no_exploration(run: RunRecord) -> Symptom | None:
    """Seen: A response's entropy, `policy/entropy` × `response/length`, is low from the start, and the score does not
    rise.

    Try: Raise `rollout.temperature` to 1, or by 30% if it is there already; `ppo.entropy_coef=0.001`, or triple it.

    Threshold: An entropy below log 2 nats, first and early: fewer than two likely responses per prompt. Serious.
    """
    entropy = _of_responses(run)
    if entropy is None or entropy.start >= TWO_RESPONSES or rose(read(run, "reward/score_mean")):
        return None  # answers of one token have little entropy even in a healthy run
    temperature = run.setting("rollout.temperature")
    is_cold = is_number(temperature) and temperature < 1
    return Symptom(
        "serious",
        f"a response has an entropy of {fmt(entropy.early)} nats from the start ({span(entropy.updates[:WINDOW])}): "
        f"about {fmt(math.exp(entropy.early))} likely responses per prompt",
        (
            set_to("rollout.temperature", 1.0, "too_low") if is_cold else scale("rollout.temperature", 1.3),
            *_raise_bonus(run),
        ),
    )


def _sampled_hotter_or_colder(run: RunRecord) -> str:
    """The reason why early and late entropies cannot be compared; empty if they can."""
    scheduled = "rollout.temperature" in (run.setting("schedules") or ())
    return "policy/entropy follows rollout.temperature, which is scheduled" if scheduled else ""


def _collapse_at_once(run: RunRecord) -> Symptom | None:
    """Symptom of an entropy that the first updates have destroyed."""
    entropy = _of_responses(run, at_least=2)
    if entropy is None or _sampled_hotter_or_colder(run):
        return None
    last = entropy.values[-1]
    if entropy.first < TWO_RESPONSES or last > NOTHING * entropy.first:
        return None
    return Symptom(
        "serious",
        f"the entropy of a response falls from {fmt(entropy.first)} to {fmt(last)} nats ({span(entropy.updates)})",
        _slow_down(run, last / entropy.first),
    )


@rule(
    "The policy is settling on one response per prompt. It stops exploring, and its responses differ too little to "
    "learn from.",
    needs=("policy/entropy|response/entropy", "response/length|response/entropy"),
    early=_collapse_at_once,
    updates=MIN_TREND,
    of_reward=True,
    lacks=_sampled_hotter_or_colder,
)
def entropy_collapse(run: RunRecord) -> Symptom | None:
    """Seen: A response's entropy falls to a fraction of its initial value.

    Try: Lower `ppo.learning_rate` to a third, or to a tenth if almost no entropy is left; `ppo.entropy_coef=0.001`, or
    triple it; `ppo.clip_range_high=0.28`, if PPO's clip of single tokens is narrower.

    Threshold: A fifth of its start; or half of it and below log 3 nats, three likely responses per prompt, unless the
    responses to most prompts score differently (`group/constant`). A warning; serious below a tenth, or at a fifth and
    below log 3. In a log of another library, whose tasks often have a single right answer, a note while the score
    rises. Runs that learn well fall to about a third. Not with a
    scheduled `rollout.temperature`, which the entropy follows.
    """
    entropy = _of_responses(run)
    if entropy is None:
        return _collapse_at_once(run)
    if entropy.start < TWO_RESPONSES:
        return None
    begun = entropy.early if entropy.early >= TWO_RESPONSES else entropy.first
    left = entropy.late / begun
    # Where the responses to most prompts score differently, there is something to learn from.
    constant = read(run, "group/constant")
    few = entropy.late < THREE_RESPONSES and (constant is None or constant.late >= FEW_CONSTANT)
    if left > COLLAPSING and not (few and left < SETTLING):
        return None
    converges = run.trainer is not None and rose(read(run, "reward/score_mean"))
    return Symptom(
        "note" if converges else "serious" if left < COLLAPSED or (few and left < COLLAPSING) else "warning",
        f"the entropy of a response falls from {fmt(begun)} to {fmt(entropy.late)} nats ({entropy.late_span})"
        + (f": about {fmt(math.exp(entropy.late))} likely responses per prompt are left" if few else ""),
        _slow_down(run, left),
    )


def _slow_down(run: RunRecord, left: float) -> Iterator[Remedy]:
    yield scale("ppo.learning_rate", 0.1 if left < NOTHING else 1 / 3)
    yield from _raise_bonus(run)
    clips_tokens = run.choice("ppo.policy_loss") in ("", "clipped", "dual_clip") and not clips_sequences(run)
    if clips_tokens and run.setting("ppo.clip_range_high") is None and run.number("ppo.clip_range") < CLIP_HIGHER:
        yield set_to("ppo.clip_range_high", CLIP_HIGHER, "too_low")


def _has_bonus(run: RunRecord) -> bool:
    """True if the run rewards entropy, in any update of a schedule."""
    coefficient = read(run, "objective/entropy_coef", at_least=1)
    largest = max(coefficient.values) if coefficient else run.number("ppo.entropy_coef")
    return largest > 0 or run.setting("ppo.entropy_target") is not None


def _raise_bonus(run: RunRecord) -> Iterator[Remedy]:
    if run.setting("ppo.entropy_target") is None:  # otherwise its controller would undo the change
        yield scale("ppo.entropy_coef", 3.0) if _has_bonus(run) else set_to("ppo.entropy_coef", 0.001, "too_low")


def _lower_bonus(run: RunRecord, start: float) -> Remedy:
    """Lower the entropy bonus, or the target of its controller if the entropy rises to that."""
    if run.setting("ppo.entropy_target") is None:
        return scale("ppo.entropy_coef", 0.1)
    lower = set_to("ppo.entropy_target", float(f"{start:.2g}"), "too_high")
    return lower if run.number("ppo.entropy_target") > start else SMALLER_STEPS


@rule(
    "The policy is becoming more random and its text is turning into noise: the entropy bonus is too large, or the "
    "steps destroy what the policy had learned.",
    needs=("policy/entropy",),
    updates=MIN_LEVEL,
    of_reward=True,
    lacks=_sampled_hotter_or_colder,
)
def entropy_rising(run: RunRecord, entropy: Series) -> Symptom | None:
    """Seen: `policy/entropy` rises.

    Try: Lower `ppo.entropy_coef` to a tenth, or a higher `ppo.entropy_target` to the start; without a bonus, lower
    `ppo.learning_rate` to a third.

    Threshold: 30% and 0.1 nats per token above the start; healthy runs stay below 10%. A warning; serious if the
    entropy doubles under an entropy bonus. Not with a scheduled `rollout.temperature`, which the entropy follows.
    """
    # A bonus that is far too large acts within the first three updates.
    start = min(entropy.first, entropy.early)
    if start <= 0:
        return None
    factor = entropy.late / start
    significant = len(entropy) < MIN_TREND or rose(entropy) or factor >= DOUBLED
    if factor < RISEN or entropy.late - start < RISEN_NATS or not significant:
        return None
    bonus = _has_bonus(run)
    return Symptom(
        "serious" if bonus and factor >= DOUBLED else "warning",
        f"entropy rises from {fmt(start)} to {fmt(entropy.late)} nats per token ({entropy.late_span})"
        + ("" if bonus else " without an entropy bonus"),
        (_lower_bonus(run, start) if bonus else SMALLER_STEPS,),
    )
