"""How far each update moves the policy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import fmean

from kedge.inspect.doctor.finding import Remedy, Rule, Symptom
from kedge.inspect.doctor.needs import WHY_MISSING, Needs
from kedge.inspect.doctor.remedies import scale, set_to
from kedge.inspect.doctor.trends import MIN_LEVEL, MIN_TREND, WINDOW, Series, fmt, read, rose, span
from kedge.inspect.record import RunRecord

__all__ = ["STEPS_TOO_LARGE", "STEPS_TOO_SMALL", "clips_sequences", "smaller_rate"]

FAR_CLIPPED, TOO_FAR_CLIPPED = 0.2, 0.35
"""Share of clipped tokens over an update's steps. N+ has 0 to 0.07, other libraries recommend staying below 0.1 to 0.3,
and models of a few million parameters tolerate 0.25 at first."""

FAR_MOVED, TOO_FAR_MOVED = 0.05, 0.2
"""KL to the sampling policy over an update's steps, nats per token. N+ and kedge's healthy runs have 0 to 0.008, and
early stopping is usually set at 0.015. At 0.05 the typical ratio is exp(√0.1) = 1.4, twice as far as the clip range of
0.2, and at 0.2 it is exp(√0.4) = 1.9."""

EXTREME_MOVED = 1.0
"""The same of a single update, which needs no history: the typical ratio is exp(√2) = 4. Ten times the right learning
rate gives 0.3, a hundred times 7."""

USUAL_CLIPPED, USUAL_MOVED = 0.07, 0.01
"""What the suggested learning rate aims at. The clip fraction grows with the learning rate, the KL with its square."""

LEAST_FACTOR = 0.1
"""Smallest factor on the learning rate: what large steps have done to a policy says little about small ones."""

HIGHEST_RATE = 1e-3
"""Adam's highest learning rate at which language models are trained, small ones included; the start after an update so
extreme that its size says nothing about the learning rate."""

NOT_CLIPPED, NOT_MOVED = 1e-3, 1e-5
"""The same for a policy that does not move: at 1e-5 nats per token the typical ratio is 1.004."""

NEAR = 0.1
"""KL to the reference, nats per response, of a policy that is still the reference."""

MANY_EPOCHS = 4
"""Epochs in all language-model papers; if a run has more, they are the first thing to reduce."""


def clips_sequences(run: RunRecord) -> bool:
    """Whether whole responses are clipped: at a range of 3e-4, most of them may be after a small step (GSPO §5.2)."""
    return run.setting("ppo.ratio") == "sequence"


def smaller_rate(run: RunRecord, *, clipped: float, moved: float, most: float) -> Remedy:
    """The learning rate that would make the steps as large as usual.

    Args:
        run: The run.
        clipped: Its clip fraction.
        moved: KL to the sampling policy, in nats per token.
        most: Largest factor on the present learning rate.
    """
    wanted = [most]
    if clipped > 0 and not clips_sequences(run):
        wanted.append(USUAL_CLIPPED / clipped)
    if moved > 0:
        wanted.append(math.sqrt(USUAL_MOVED / moved))
    factor, present = max(LEAST_FACTOR, min(wanted)), run.setting("ppo.learning_rate")
    if moved > EXTREME_MOVED and isinstance(present, (int, float)) and factor * present > HIGHEST_RATE:
        return set_to(run, "ppo.learning_rate", HIGHEST_RATE, "too_high")
    return scale(run, "ppo.learning_rate", factor)


def _extreme(run: RunRecord) -> Symptom | None:
    """A single update that left nothing of the policy. Later ones may be small: a collapsed policy cannot move."""
    moved = read(run, "policy/approx_kl", at_least=1)
    if moved is None or max(moved.values) <= EXTREME_MOVED:
        return None
    worst = max(moved.values)
    clipped = read(run, "policy/clip_fraction", at_least=1)
    share = "" if clipped is None else f" and clips {clipped.at([moved.argmax]):.0%} of the tokens"
    return Symptom(
        "serious",
        f"update {moved.argmax} moves the policy by {fmt(worst)} nats per token{share}",
        (smaller_rate(run, clipped=0.0, moved=worst, most=1 / 3),),
    )


def _too_large(run: RunRecord) -> Symptom | None:
    if extreme := _extreme(run):
        return extreme
    clipped, moved = read(run, "policy/clip_fraction"), read(run, "policy/approx_kl")
    if clipped is None or moved is None:
        return None
    far = 0.0 if clips_sequences(run) else clipped.peak
    if far <= FAR_CLIPPED and moved.peak <= FAR_MOVED:
        return None
    worse = clipped if far / FAR_CLIPPED > moved.peak / FAR_MOVED else moved
    return Symptom(
        "serious" if far > TOO_FAR_CLIPPED or moved.peak > TOO_FAR_MOVED else "warning",
        f"up to {clipped.peak:.0%} of the tokens are clipped, and an update moves the policy by up to "
        f"{fmt(moved.peak)} nats per token ({span(worse.peak_updates)}){_by_epoch(run)}",
        tuple(_smaller_steps(run, clipped, moved, at_start=worse.values.index(max(worse.values)) < WINDOW)),
    )


def _smaller_steps(run: RunRecord, clipped: Series, moved: Series, *, at_start: bool) -> Iterator[Remedy]:
    if (run.setting("ppo.num_epochs") or 0) > MANY_EPOCHS:
        yield set_to(run, "ppo.num_epochs", MANY_EPOCHS, "too_high")
    yield smaller_rate(run, clipped=clipped.peak, moved=moved.peak, most=1 / 3)
    if at_start and not run.setting("ppo.warmup_fraction"):
        yield set_to(run, "ppo.warmup_fraction", 0.1, "too_low")
    if run.setting("ppo.early_stop_kl") is None:
        yield set_to(run, "ppo.early_stop_kl", 0.02, why="to end an update that moves too far")


def _by_epoch(run: RunRecord) -> str:
    """Mean clip fraction in the first and in the last epoch; empty for a loss without PPO's clip of single tokens."""
    rows = [row["epochs"] for row in run.details if len(row.get("epochs") or ()) > 1]
    ends = [(epochs[0], epochs[-1]) for epochs in rows if "clip_fraction" in epochs[0]]
    if not ends:
        return ""
    first, last = (fmean(epoch["clip_fraction"] for epoch in side) for side in zip(*ends, strict=True))
    return f"; on average {first:.0%} are clipped in the first epoch and {last:.0%} in the last"


def _too_small(run: RunRecord) -> Symptom | None:
    if not _has_further_steps(run):
        return _frozen(run)
    clipped = read(run, "policy/clip_fraction", at_least=MIN_TREND, of_policy=True)
    moved = read(run, "policy/approx_kl", at_least=MIN_TREND, of_policy=True)
    if clipped is None or moved is None or clipped.peak > NOT_CLIPPED or moved.peak > NOT_MOVED:
        return None
    kl, score = read(run, "objective/kl"), read(run, "reward/score_mean")
    if rose(score) or (kl is not None and kl.late > NEAR):
        return None
    return Symptom(
        "serious",
        f"at most {clipped.peak:.2%} of the tokens are clipped, and an update moves the policy by at most "
        f"{fmt(moved.peak)} nats per token ({span(moved.peak_updates)}){_distance(kl)}; the score does not rise",
        (scale(run, "ppo.learning_rate", 10.0), scale(run, "ppo.num_epochs", 2.0)),
    )


def _frozen(run: RunRecord) -> Symptom | None:
    """A policy that is still the reference, in a run whose ratios are 1 whatever it does.

    Nowhere in the run is it farther away than a single update that is too small would take it. A reference that is not
    the policy's start, or rounding in bf16, hides it.
    """
    kl, length = read(run, "objective/kl", at_least=MIN_TREND, of_policy=True), read(run, "response/length")
    if kl is None or length is None or rose(read(run, "reward/score_mean")):
        return None
    farthest = max(abs(value) for value in kl.values)
    if farthest > NOT_MOVED * max(length.late, 1.0):
        return None
    return Symptom(
        "serious",
        f"the policy is never more than {fmt(farthest)} nats per response from the reference ({span(kl.updates)}); the "
        "score does not rise",
        (scale(run, "ppo.learning_rate", 10.0),),
    )


def _lacks_kl(run: RunRecord) -> str:
    """Of an update's only step, neither ratio nor clip tells anything."""
    return "" if _has_further_steps(run) or run.series("objective/kl")[0] else WHY_MISSING["objective/kl"]


def _has_further_steps(run: RunRecord) -> bool:
    """Whether an update takes more than one step: the first one's ratios are 1, whatever the learning rate."""
    return not (run.setting("ppo.num_epochs") == 1 and run.setting("ppo.num_minibatches") in (None, 1))


def _distance(kl: Series | None) -> str:
    return "" if kl is None else f"; after {kl.updates[-1]} updates it is {fmt(kl.late)} nats from the reference"


STEPS_TOO_LARGE = Rule(
    "steps_too_large",
    "Each update moves the policy further than its samples can support: beyond the clip range they describe a policy "
    "that no longer exists. If it continues, KL and entropy run away and the text falls apart.",
    ("policy/clip_fraction", "policy/approx_kl"),
    _too_large,
    Needs(("policy/clip_fraction", "policy/approx_kl"), MIN_LEVEL),
)

STEPS_TOO_SMALL = Rule(
    "steps_too_small",
    "The policy barely moves: the run spends its compute without learning.",
    ("policy/clip_fraction", "policy/approx_kl", "objective/kl", "response/length", "reward/score_mean"),
    _too_small,
    Needs(("policy/clip_fraction", "policy/approx_kl"), MIN_TREND, of_policy=True, lacks=_lacks_kl),
)
