"""How far an update goes."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from kedge.inspect.doctor.courses import TREND, WINDOW, Course, course, figure, rose
from kedge.inspect.doctor.finding import Remedy, Rule, Symptom
from kedge.inspect.doctor.remedies import change, scale
from kedge.inspect.record import RunRecord

__all__ = ["STEPS_TOO_LARGE", "STEPS_TOO_SMALL"]

FAR_CLIPPED, TOO_FAR_CLIPPED = 0.2, 0.35
"""Share of tokens that the clip holds back, over an update's steps. N+ has 0 to 0.07; other libraries
say to stay under 0.1 to 0.3; models of a few million parameters bear 0.25 at first."""

FAR_MOVED, TOO_FAR_MOVED = 0.06, 0.2
"""KL to the sampling policy, nats per token, over an update's steps. N+ has 0 to 0.008, and the custom is to stop at
0.015; above 0.2 the typical ratio is exp(√0.4) = 1.9, far outside of every clip range."""

NIL_CLIPPED, NIL_MOVED = 1e-3, 1e-5
"""The same where nothing is moved: at 1e-5 nats per token the typical ratio is 1.004."""

NEAR = 0.1
"""KL to the reference, nats per response, at which the policy is still the reference."""

MANY_EPOCHS = 4
"""Epochs in all papers on language; more of them are the first to go."""


def _too_large(run: RunRecord) -> Symptom | None:
    clipped, moved = course(run, "policy/clip_fraction"), course(run, "policy/approx_kl")
    if clipped is None or moved is None or (clipped.peak <= FAR_CLIPPED and moved.peak <= FAR_MOVED):
        return None
    when = clipped if clipped.peak / FAR_CLIPPED > moved.peak / FAR_MOVED else moved
    return Symptom(
        "serious" if clipped.peak > TOO_FAR_CLIPPED or moved.peak > TOO_FAR_MOVED else "warning",
        f"{clipped.peak:.0%} of the tokens are clipped at worst, and an update moves the policy by "
        f"{figure(moved.peak)} nats per token ({when.peak_span}){_by_epoch(run)}",
        tuple(_shorter_steps(run, at_first=when.figures.index(max(when.figures)) < WINDOW)),
    )


def _shorter_steps(run: RunRecord, *, at_first: bool) -> Iterator[Remedy]:
    epochs = run.setting("ppo.num_epochs") or 0
    if epochs > MANY_EPOCHS:
        yield Remedy("ppo.num_epochs", "too_high", f"ppo.num_epochs={MANY_EPOCHS} instead of {epochs}")
    yield scale(run, "ppo.learning_rate", 1 / 3)
    if at_first and not run.setting("ppo.warmup_fraction"):
        yield Remedy("ppo.warmup_fraction", "too_low", "ppo.warmup_fraction=0.1: it is the first steps that go too far")
    if run.setting("ppo.early_stop_kl") is None:
        yield change("ppo.early_stop_kl", 0.02, "which ends an update that goes too far")


def _by_epoch(run: RunRecord) -> str:
    """What the clip holds back in the first epoch and in the last one, on average."""
    ends = [(row["epochs"][0], row["epochs"][-1]) for row in run.details if len(row.get("epochs") or ()) > 1]
    if not ends:
        return ""
    first, last = (fmean(epoch["clip_fraction"] for epoch in side) for side in zip(*ends, strict=True))
    return f"; by epoch, clipped are {first:.0%} in the first and {last:.0%} in the last"


def _too_small(run: RunRecord) -> Symptom | None:
    clipped, moved = course(run, "policy/clip_fraction", least=TREND), course(run, "policy/approx_kl", least=TREND)
    if clipped is None or moved is None or clipped.peak > NIL_CLIPPED or moved.peak > NIL_MOVED:
        return None
    drift, score = course(run, "objective/kl"), course(run, "reward/score_mean")
    if rose(score) or (drift is not None and drift.late > NEAR):
        return None
    return Symptom(
        "serious",
        f"{clipped.peak:.2%} of the tokens are clipped at most, and an update moves the policy by {figure(moved.peak)} "
        f"nats per token ({moved.peak_span}){_still(drift)}; the score does not rise",
        (scale(run, "ppo.learning_rate", 10.0), scale(run, "ppo.num_epochs", 2.0)),
    )


def _still(drift: Course | None) -> str:
    if drift is None:
        return ""
    return f"; after {drift.updates[-1]} updates it is {figure(drift.late)} nats from the reference"


STEPS_TOO_LARGE = Rule(
    "steps_too_large",
    "An update goes further than the responses that it learns from can tell: beyond the clip the gradient is that "
    "of a policy which no longer exists. KL and entropy run away next, and the text goes with them.",
    ("policy/clip_fraction", "policy/approx_kl"),
    _too_large,
)

STEPS_TOO_SMALL = Rule(
    "steps_too_small",
    "The policy hardly moves, so that the run is spent on standing still.",
    ("policy/clip_fraction", "policy/approx_kl", "objective/kl", "reward/score_mean"),
    _too_small,
)
