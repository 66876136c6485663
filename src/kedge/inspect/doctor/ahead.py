"""Sampling ahead of training: how old the responses are, and which side waits."""

from __future__ import annotations

from kedge.inspect.doctor.cost import SHORT_UPDATE
from kedge.inspect.doctor.finding import Rule, Symptom
from kedge.inspect.doctor.needs import Needs
from kedge.inspect.doctor.remedies import adjust, scale, set_to
from kedge.inspect.doctor.trends import MIN_LEVEL, fmt, read
from kedge.inspect.record import RunRecord

__all__ = ["ONE_SIDE_WAITS", "ROLLOUT_TOO_OLD"]

TRUNCATED = 0.05
"""Share of tokens with a truncated importance weight: the correction of these is biased."""

EFFECTIVE = 0.5
"""Effective share of the tokens: below it, half of the sampling is wasted."""

WAITING = 1 / 3
"""Share of an update's time that a side may wait."""


def _samples_ahead(run: RunRecord) -> bool:
    return bool(run.setting("rollout.max_staleness"))


def _too_old(run: RunRecord) -> Symptom | None:
    truncated, share = read(run, "policy/sampler_truncated"), read(run, "policy/sampler_share", at_least=MIN_LEVEL)
    seen: list[str] = []
    if truncated is not None and truncated.late > TRUNCATED:
        seen.append(f"{fmt(100 * truncated.late)}% of the importance weights are truncated")
    if share is not None and share.late < EFFECTIVE:
        seen.append(f"the tokens count as {fmt(100 * share.late)}% of their number")
    staleness = run.setting("rollout.max_staleness")
    if not seen or share is None or not isinstance(staleness, int):
        return None
    fewer = (set_to(run, "rollout.max_staleness", staleness - 1, "too_high"),)
    return Symptom(
        "warning",
        f"{' and '.join(seen)} ({share.late_span})",
        (*fewer, scale(run, "ppo.learning_rate", 0.5)),
        "steps that move the policy less make old responses less harmful, too",
    )


def _waits(run: RunRecord) -> Symptom | None:
    total = read(run, "time/update", at_least=MIN_LEVEL)
    training, sampling = read(run, "time/waiting_for_rollout"), read(run, "time/rollout_waiting")
    if total is None or training is None or sampling is None or total.late < SHORT_UPDATE:
        return None
    if training.late > WAITING * total.late:
        builtin = run.setting("rollout.engine") == "builtin"
        faster = set_to(run, "rollout.engine", "vllm") if builtin else adjust(run, "rollout.vllm.devices", "too_low")
        return Symptom(
            "note",
            f"training waits {fmt(training.late)} of {fmt(total.late)} seconds per update for responses "
            f"({total.late_span})",
            (faster,),
            "give sampling more of the devices",
        )
    if sampling.late > WAITING * total.late:
        return Symptom(
            "note",
            f"sampling waits {fmt(sampling.late)} of {fmt(total.late)} seconds per update for weights "
            f"({total.late_span})",
            (set_to(run, "rollout.max_staleness", 0, why="if both sides can use the same devices"),),
            "give training more of the devices",
        )
    return None


ROLLOUT_TOO_OLD = Rule(
    "rollout_too_old",
    "The policy has moved far from the weights that sampled. Importance weights correct for it, but they vary so much "
    "that few tokens count, and where they are truncated the gradient is biased.",
    ("policy/sampler_truncated", "policy/sampler_share", "policy/staleness"),
    _too_old,
    Needs(("policy/sampler_share",), MIN_LEVEL, fits=_samples_ahead),
)

ONE_SIDE_WAITS = Rule(
    "one_side_waits",
    "Sampling ahead hides the shorter of rollout and training behind the longer one. Where one side takes far longer, "
    "the devices of the other are idle.",
    ("time/waiting_for_rollout", "time/rollout_waiting", "time/update"),
    _waits,
    Needs(("time/waiting_for_rollout", "time/rollout_waiting"), MIN_LEVEL, fits=_samples_ahead),
)
