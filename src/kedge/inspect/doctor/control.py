"""Control: returns that do not rise or fall again, and updates that go too far."""

from __future__ import annotations

from collections.abc import Iterator

from kedge.inspect.doctor.finding import Remedy, Rule, Symptom
from kedge.inspect.doctor.needs import Needs
from kedge.inspect.doctor.remedies import scale, set_to
from kedge.inspect.doctor.trends import MIN_LEVEL, MIN_TREND, fmt, read, rose
from kedge.inspect.record import RunRecord

__all__ = ["RETURN_COLLAPSED", "RETURN_FLAT", "UPDATES_TOO_LARGE"]

CONTROL = ("control",)

LOST = 0.5
"""Share of the gain that a run has lost again."""

FAR, TOO_FAR = 0.1, 1.0
"""KL of an update, nats per step: in the first ten updates on HalfCheetah-v5 at most 0.015 with a clip range of 0.2,
and 0.3 to 0.5 without a clip."""


def _collapsed(run: RunRecord) -> Symptom | None:
    returns = read(run, "episode/return_mean", at_least=2 * MIN_TREND)
    if returns is None or returns.peak <= returns.early:
        return None
    lost = (returns.peak - returns.late) / (returns.peak - returns.early)
    if lost <= LOST or returns.peak - returns.late <= 3 * returns.rise_error:
        return None
    return Symptom(
        "serious",
        f"the mean return fell from {fmt(returns.peak)} (update {returns.peak_updates[0]}) to {fmt(returns.late)} "
        f"({returns.late_span}): {lost:.0%} of what it had gained",
        tuple(_smaller_steps(run)),
    )


def _flat(run: RunRecord) -> Symptom | None:
    returns = read(run, "episode/return_mean", at_least=4 * MIN_TREND)
    if returns is None or rose(returns) or returns.peak - returns.early > 3 * returns.rise_error:
        return None
    return Symptom(
        "warning",
        f"the mean return stayed near {fmt(returns.late)} for {len(returns)} updates",
        (
            scale(run, "control.num_envs", 2.0),
            scale(run, "control.entropy_coef", 2.0),
            scale(run, "control.total_steps", 3.0),
        ),
        "check that the reward differs between good and bad behavior within an episode's reach",
    )


def _too_large(run: RunRecord) -> Symptom | None:
    moved = read(run, "policy/distance_moved")
    if moved is None or moved.late <= FAR:
        return None
    return Symptom(
        "serious" if moved.late > TOO_FAR else "warning",
        f"an update moves the policy by {fmt(moved.late)} nats per step ({moved.late_span})",
        tuple(_smaller_steps(run)),
    )


def _smaller_steps(run: RunRecord) -> Iterator[Remedy]:
    if run.setting("control.policy_loss") == "unclipped" and (run.setting("control.num_epochs") or 1) > 1:
        yield set_to(run, "control.policy_loss", "clipped", why="so that steps have a bound")
    yield scale(run, "control.learning_rate", 1 / 3)
    if run.setting("control.early_stop_kl") is None:
        yield set_to(run, "control.early_stop_kl", 0.02, why="to end an update that moves too far")


RETURN_COLLAPSED = Rule(
    "return_collapsed",
    "The policy has unlearned: an update went further than its steps could support, and the next ones learned from "
    "what a bad policy plays.",
    ("episode/return_mean",),
    _collapsed,
    Needs(("episode/return_mean",), 2 * MIN_TREND, CONTROL),
)

UPDATES_TOO_LARGE = Rule(
    "updates_too_large",
    "Each update moves the policy further than the steps that it was computed from can support.",
    ("policy/distance_moved",),
    _too_large,
    Needs(("policy/distance_moved",), MIN_LEVEL, CONTROL),
)

RETURN_FLAT = Rule(
    "return_flat",
    "Nothing is learned: what is rewarded was hardly ever met, or steps are too few or too small.",
    ("episode/return_mean",),
    _flat,
    Needs(("episode/return_mean",), 4 * MIN_TREND, CONTROL),
)
