"""Numerics and steps: batches and steps that the guard discarded, and the size of updates."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from kedge_inspect.doctor.critic import HARMFUL, relies_on_critic, train_critic_less, with_something_to_explain
from kedge_inspect.doctor.responses import scores_are_constant
from kedge_inspect.doctor.rule import SMALLER_STEPS, TRAINED, WHY_MISSING, Change, Remedy, Symptom, rule, scale, set_to
from kedge_inspect.doctor.series import MIN_LEVEL, MIN_TREND, WINDOW, Series, combine, fell, fmt, read, rose, span
from kedge_inspect.record import RunRecord, is_number
from kedge_inspect.resolved import compares_groups

OFTEN = 0.1
"""Share of affected updates above which chance does not explain them."""

NEIGHBORS = 8
"""Updates on either side that a gradient norm is compared with, since norms drift over a run."""

SPIKE = 8.0
"""Gradient norm, relative to the lower quartile of its neighbors, that is a spike. (If every third batch is an outlier,
so is the median.) The larger quartile of those before and after it counts: a critic's norm falls steeply while it is
fitted. In healthy runs norms stay within a factor of 3 after the first updates.
"""

RARE = 0.01
"""Harmless share of spikes: norm clipping handles them."""

CLIMB = 10.0
"""Growth of the gradient norm, late over early, that does not occur in healthy runs."""


NORMS = {
    "policy/grad_norm": "the gradient norm",
    "value/grad_norm": "the critic's gradient norm",
    "grad_norm": "the gradient norm",
}
"""Names of a run's norms. A critic that shares no gradient with the policy has its own."""


@rule(
    "A score, logprob, loss or gradient was NaN or infinite: a division by zero in a reward function, corrupt weights, "
    "or steps so large that values overflow.",
)
def not_finite(run: RunRecord) -> Symptom | None:
    """Seen: `incidents.jsonl` has a NaN or infinite score, logprob, loss or gradient.

    Try: Inspect the response named in `incidents.jsonl` and the reward that scored it; for anything but a score, lower
    `ppo.learning_rate` to a third.

    Threshold: Any incident is a warning. It is serious if one stopped the run or more than a tenth of the updates are
    affected, which is not an accident.
    """
    found = [incident for incident in run.incidents if incident.get("kind") == "nonfinite"]
    if not found:
        return None
    updates = sorted({incident["update"] for incident in found})
    stopped = any(incident.get("consequence") == "stop" for incident in found)
    return Symptom(
        "serious" if stopped or len(updates) > OFTEN * len(run.metrics) else "warning",
        f"{found[0]['what']} at {span(updates[:1])}"
        + (f"; {len(updates)} updates are affected" if len(updates) > 1 else ""),
        _unless_of_scores(found),
        "inspect the response named in incidents.jsonl and the reward that scored it",
    )


def _unless_of_scores(incidents: Sequence[Mapping[str, Any]]) -> tuple[Remedy, ...]:
    """Suggest smaller steps, unless all incidents are scores, which do not depend on the steps.

    A score belongs to a whole response. Other values have a token, and those of a step its figures.
    """
    of_scores = [
        each.get("row") is not None and each.get("token") is None and not each.get("figures") for each in incidents
    ]
    return () if of_scores and all(of_scores) else (SMALLER_STEPS,)


@rule(
    "The guard discarded optimizer steps because their figures were non-finite or far too large. Once is an accident; "
    "a run that keeps skipping steps is not training.",
    needs=("guard/skipped_steps",),
)
def steps_skipped(run: RunRecord, steps: Series) -> Symptom | None:
    """Seen: `guard/skipped_steps` is above 0.

    Try: Read the reasons in `incidents.jsonl`; unless they are scores, lower `ppo.learning_rate` to a third.

    Threshold: Any skipped step is a warning; skips in more than a tenth of the updates, and in at least two, are
    serious.
    """
    skipped = steps.where(lambda count: count > 0)
    if not skipped:
        return None
    return Symptom(
        "serious" if len(skipped) > max(1, OFTEN * len(steps)) else "warning",
        f"optimizer steps were skipped in {len(skipped)} of {len(steps)} updates ({span(skipped.updates)})",
        _unless_of_scores(run.incidents),
        "see incidents.jsonl for the reasons",
    )


@rule(
    "Single batches have far larger gradients than the rest, or the gradients grow throughout: outlier scores, or "
    "weights that are diverging. Norm clipping limits the size of such a step, not its direction.",
    needs=("policy/grad_norm|grad_norm",),
    updates=MIN_TREND,
    stages=TRAINED,
    of_policy=True,
)
def gradient_spikes(run: RunRecord) -> Symptom | None:
    """Seen: `policy/grad_norm`, `value/grad_norm` or `grad_norm` has outliers or keeps growing.

    Try: `ppo.on_spike=skip` skips such steps; unless they are so few that norm clipping handles them, lower the
    learning rate, or `ppo.critic_learning_rate`, to a third.

    Threshold: A norm of 8 times the lower quartile of the eight updates before and of those after it, or a tenfold rise
    from early to late, unless the loss of supervised training falls: a new head starts with small gradients. Healthy
    runs stay within a factor of 3. A warning; a note if at most one update in a hundred
    spikes. Of `policy/grad_norm`, updates in which only the critic is trained do not count, nor do those in which the
    responses to each prompt all score the same, with an advantage that compares them: these have no gradient.
    """
    found = {each: spikes for each in NORMS if (spikes := _spikes_of(run, each))}
    if not found:
        return None
    seen, often = zip(*found.values(), strict=True)
    remedies = _tame(run, found, lowers_rate=any(often))
    rare = "" if any(often) else "watch for more: norm clipping handles rare ones"
    return Symptom("note" if rare else "warning", "; ".join(seen), remedies, rare)


def _spikes_of(run: RunRecord, name: str) -> tuple[str, bool] | None:
    """A norm's spikes or climb, and True if they are more than norm clipping handles; None without either."""
    # With a shared critic, this is the value head's norm during the critic's warm-up, before the policy is trained.
    of_policy = name == "policy/grad_norm"
    norm = read(run, name, at_least=MIN_TREND, of_policy=of_policy)
    if of_policy and compares_groups(run):
        if norm and (constant := read(run, "group/constant", at_least=1)):
            norm = combine(lambda each, share: each if share < 1 else None, norm, constant)
        if norm and (within := read(run, "group/score_std", at_least=1)):
            norm = combine(lambda each, std: each if std > 0 else None, norm, within)
    if norm is None or len(norm) < MIN_TREND:
        return None
    usual = [_usual(norm.values, index) for index in range(len(norm))]
    spikes = [index for index in range(WINDOW, len(norm)) if norm.values[index] > SPIKE * usual[index] > 0]
    climbed = norm.late > CLIMB * norm.early > 0 and not fell(read(run, "loss"))
    if not spikes and not climbed:
        return None
    seen: list[str] = []
    if spikes:
        worst = max(spikes, key=lambda index: norm.values[index])
        seen.append(
            f"{NORMS[name]} is {fmt(norm.values[worst])} at update {norm.updates[worst]}, where "
            f"{fmt(usual[worst])} is typical; {len(spikes)} of {len(norm)} updates have such a spike"
        )
    if climbed:
        seen.append(f"{NORMS[name]} grows from {fmt(norm.early)} to {fmt(norm.late)} ({norm.late_span})")
    # Where few groups differ, as in logs of other libraries at a few prompts per step, one of them makes a spike.
    return "; ".join(seen), climbed or len(spikes) > max(float(run.trainer is not None), RARE * len(norm))


def _usual(norms: Sequence[float], index: int) -> float:
    sides = (norms[max(0, index - NEIGHBORS) : index], norms[index + 1 : index + 1 + NEIGHBORS])
    return max(sorted(side)[len(side) // 4] for side in sides if side)


def section_of(run: RunRecord) -> str:
    """The section of the configuration with a run's learning rate; by its metrics if its stage is not known."""
    if run.stage:
        return {"reward": "reward_model"}.get(run.stage, run.stage)
    marks = {"accuracy": "reward_model", "explained_variance": "critic", "loss": "sft"}
    return next((section for mark, section in marks.items() if mark in run.metrics[-1]), "ppo")


def _tame(run: RunRecord, norms: Collection[str], *, lowers_rate: bool) -> Iterator[Remedy]:
    section = section_of(run)
    if section == "ppo" and run.setting("ppo.on_spike") is None:
        yield set_to("ppo.on_spike", "skip", why="to skip such steps")
    if not lowers_rate:
        return
    has_own_rate = bool(run.setting("ppo.critic_learning_rate"))
    if "value/grad_norm" in norms and has_own_rate:
        yield scale("ppo.critic_learning_rate", 1 / 3)
    if not (has_own_rate and set(norms) == {"value/grad_norm"}):
        yield scale(f"{section}.learning_rate", 1 / 3)


FAR_CLIPPED = 0.2
TOO_FAR_CLIPPED = 0.35
"""Share of clipped tokens over an update's steps. N+ has 0 to 0.07, other libraries recommend staying below 0.1 to 0.3,
and models of a few million parameters tolerate 0.25 at first."""

FAR_MOVED = 0.05
TOO_FAR_MOVED = 0.2
"""KL to the sampling policy over an update's steps, nats per token. N+ and kedge's healthy runs have 0 to 0.008, and
early stopping is usually set at 0.015. At 0.05 the typical ratio is exp(√0.1) = 1.4, twice as far as the clip range of
0.2, and at 0.2 it is exp(√0.4) = 1.9."""

EXTREME_MOVED = 1.0
"""KL of a single update that is a finding without any history: the typical ratio is exp(√2) = 4. Ten times the right
learning rate gives 0.3, a hundred times 7.
"""

USUAL_CLIPPED = 0.07
USUAL_MOVED = 0.01
"""Clip fraction and KL that the suggested learning rate aims at. The clip fraction grows with the learning rate, the KL
with its square."""

LEAST_FACTOR = 0.1
"""Smallest factor for the learning rate: the effects of large steps predict little about small ones."""

HIGHEST_RATE = 1e-3
"""Adam's highest learning rate at which language models are trained, small ones included; the suggestion after an
update so extreme that its size says nothing about the learning rate.
"""

NOT_CLIPPED = 1e-3
NOT_MOVED = 1e-5
"""KL of a policy that does not move: at 1e-5 nats per token, the typical ratio is 1.004."""

NEAR = 0.1
"""KL to the reference, nats per response, of a policy that is still the reference."""

MANY_EPOCHS = 4
"""Maximum number of epochs in language-model papers; if a run has more, they are the first thing to reduce."""


def clips_sequences(run: RunRecord) -> bool:
    """True if whole responses or turns are clipped: at a range of 3e-4, most may be after a small step (GSPO §5.2)."""
    return run.setting("ppo.ratio") in ("sequence", "turn")


def smaller_rate(*, moved: float, clipped: float = 0.0, most: float = 1 / 3) -> Remedy:
    """Suggest the learning rate that would make the steps as large as usual.

    Args:
        clipped: The run's clip fraction.
        moved: KL to the sampling policy, in nats per token.
        most: Largest factor on the present learning rate.
    """

    def change(run: RunRecord) -> Change:
        wanted = [most]
        if clipped > 0 and not clips_sequences(run):
            wanted.append(USUAL_CLIPPED / clipped)
        if moved > 0:
            wanted.append(math.sqrt(USUAL_MOVED / moved))
        factor = max(LEAST_FACTOR, min(wanted))
        present = run.setting("ppo.learning_rate")
        if moved > EXTREME_MOVED and is_number(present) and factor * present > HIGHEST_RATE:
            return set_to("ppo.learning_rate", HIGHEST_RATE, "too_high")(run)
        return scale("ppo.learning_rate", factor)(run)

    return change


LARGER = 3.0
"""Factor for the learning rate of a policy that may move too little."""


def larger_steps(run: RunRecord) -> tuple[Remedy, ...]:
    """Suggest a higher learning rate if the policy could move, has not, and larger steps would be safe.

    The KL to the reference also reveals updates with a single step, which clip nothing. Without any KL, nothing is
    suggested.
    """
    clipped = read(run, "policy/clip_fraction", of_policy=True)
    moved = read(run, "policy/approx_kl", of_policy=True)
    kl = read(run, "objective/kl", of_policy=True)
    length = read(run, "response/length")
    if moved is None and kl is None:
        return ()  # another library's log, where steps may be too large as well
    has_room = clipped is None or clips_sequences(run) or LARGER * clipped.peak <= FAR_CLIPPED
    is_short = moved is None or LARGER**2 * moved.peak <= FAR_MOVED
    is_near = kl is None or length is None or kl.late - kl.first <= FAR_MOVED * max(length.late, 1.0)
    is_possible = has_room and is_short and is_near and _takes_steps(run)
    return (scale("ppo.learning_rate", LARGER),) if is_possible else ()


def _extreme(run: RunRecord) -> Symptom | None:
    """Symptom of a single update that destroyed the policy; later ones may be small, since nothing is left to move."""
    moved = read(run, "policy/approx_kl", at_least=1)
    if moved is None or max(moved.values) <= EXTREME_MOVED:
        return None
    worst = max(moved.values)
    clipped = read(run, "policy/clip_fraction", at_least=1)
    share = dict(clipped.items).get(moved.argmax) if clipped else None
    clips = "" if share is None else f" and clips {share:.0%} of the tokens"
    return Symptom(
        "serious",
        f"update {moved.argmax} moves the policy by {fmt(worst)} nats per token{clips}",
        (smaller_rate(moved=worst),),
    )


@rule(
    "Each update moves the policy further than its samples can support: beyond the clip range they describe a policy "
    "that no longer exists. If it continues, KL and entropy run away and the text falls apart.",
    needs=("policy/clip_fraction|policy/approx_kl",),
    early=_extreme,
    updates=MIN_LEVEL,
    of_policy=True,
)
def steps_too_large(run: RunRecord) -> Symptom | None:
    """Seen: `policy/clip_fraction` or `policy/approx_kl` is high over three consecutive updates.

    Try: `ppo.num_epochs=4` if there are more; the `ppo.learning_rate` that would bring the clip fraction, which grows
    with it, to 0.07 and the KL, which grows with its square, to 0.01, but at most a third and at least a tenth of the
    present one; `ppo.schedule={linear: 0.1}` if the first updates go furthest; `ppo.early_stop_kl=0.02`. After a single
    update of more than 1 nat per token at most 0.001, the highest of small models.

    Threshold: More than 20% clipped tokens or 0.05 nats per token is a warning, 35% or 0.2 nats serious. N+ has 0 to
    7% and 0 to 0.008 nats, like kedge's healthy runs; small models tolerate 25% at first. At 0.05 nats the typical
    ratio is 1.4, twice as far as the clip range of 0.2. With `ppo.ratio=sequence` or `turn`, which clip half of the
    responses or turns after a small step, only the KL counts. A single update of more than 1 nat per token is also
    serious, as a policy that has collapsed cannot move later. As serious as what such steps do to the policy
    (stops_at_once, entropy_collapse, kl_exploding, too_few_eos, score_falling), unless something else explains that.
    """
    if extreme := _extreme(run):
        return extreme
    clipped = read(run, "policy/clip_fraction", of_policy=True)
    moved = read(run, "policy/approx_kl", of_policy=True)
    share = clipped.peak if clipped else 0.0
    distance = moved.peak if moved else 0.0
    far = 0.0 if clips_sequences(run) else share
    if far <= FAR_CLIPPED and distance <= FAR_MOVED:
        return None
    worse = clipped if moved is None or (clipped and far / FAR_CLIPPED > distance / FAR_MOVED) else moved
    assert worse is not None
    seen = [f"up to {share:.0%} of the tokens are clipped"] if clipped else []
    seen += [f"an update moves the policy by up to {fmt(distance)} nats per token"] if moved else []
    return Symptom(
        "serious" if far > TOO_FAR_CLIPPED or distance > TOO_FAR_MOVED else "warning",
        f"{', and '.join(seen)} ({span(worse.peak_updates)}){_by_epoch(run)}",
        tuple(_smaller_steps(run, share, distance, at_start=worse.values.index(max(worse.values)) < WINDOW)),
    )


def _smaller_steps(run: RunRecord, clipped: float, moved: float, *, at_start: bool) -> Iterator[Remedy]:
    yield from _fewer_epochs(run)
    yield smaller_rate(clipped=clipped, moved=moved)
    if at_start and isinstance(decay := run.setting("ppo.schedule"), str):
        yield set_to("ppo.schedule", {decay: 0.1}, "too_low")
    if run.setting("ppo.early_stop_kl") is None:
        yield set_to("ppo.early_stop_kl", 0.02, why="to end an update that moves too far")


def _fewer_epochs(run: RunRecord) -> list[Remedy]:
    return [set_to("ppo.num_epochs", MANY_EPOCHS, "too_high")] if _num_epochs(run) > MANY_EPOCHS else []


def _num_epochs(run: RunRecord) -> float:
    """The passes over an update's responses, below 1 for a share of them.

    If the settings do not say, 2, and 1 in a log of another library.
    """
    value = run.setting("ppo.num_epochs")
    return value if is_number(value) else 2 if run.trainer is None else 1


def _by_epoch(run: RunRecord) -> str:
    """Mean clip fraction in the first and in the last epoch; empty for a loss without PPO's clip of single tokens."""
    rows = [row["epochs"] for row in run.details if len(row.get("epochs") or ()) > 1]
    ends = [(epochs[0], epochs[-1]) for epochs in rows if "clip_fraction" in epochs[0]]
    if not ends:
        return ""
    first, last = (fmean(epoch["clip_fraction"] for epoch in side) for side in zip(*ends, strict=True))
    return f"; on average {first:.0%} are clipped in the first epoch and {last:.0%} in the last"


@rule(
    "The policy barely moves: the run spends its compute without learning.",
    needs=("policy/clip_fraction", "policy/approx_kl"),
    updates=MIN_TREND,
    of_policy=True,
    # Neither ratio nor clip of an update's only step is informative.
    lacks=lambda run: "" if _has_further_steps(run) or run.series("objective/kl")[0] else WHY_MISSING["objective/kl"],
)
def steps_too_small(run: RunRecord, clipped: Series, moved: Series) -> Symptom | None:
    """Seen: `policy/clip_fraction` and `policy/approx_kl` stay near 0, and the score does not rise. Where an update
    takes a single step both are 0 in any case, and `objective/kl` decides.

    Try: Raise `ppo.learning_rate` tenfold; double `ppo.num_epochs`.

    Threshold: A clip fraction of at most 0.001 and at most 1e-5 nats per token at the peak, and a KL to the reference
    of at most 0.1 nats per response. With a single step per update: a KL to the reference of at most 1e-5 nats per
    token in every update, which a reference other than the policy's start, or rounding in bf16, hides. Serious. Updates
    in which only the critic is trained do not count. Not where nothing could move the policy: all scores are the same
    ([reward_flat](#reward_flat)), or all of a prompt's with an advantage that compares them
    ([groups_without_spread](#groups_without_spread), [groups_of_one](#groups_of_one)), or the guard skips steps in
    every update ([steps_skipped](#steps_skipped)).
    """
    if not _takes_steps(run):
        return None
    if not _has_further_steps(run):
        return _frozen(run)
    if clipped.peak > NOT_CLIPPED or moved.peak > NOT_MOVED:
        return None
    kl = read(run, "objective/kl")
    score = read(run, "reward/score_mean")
    if rose(score) or (kl is not None and kl.late > NEAR):
        return None
    distance = f"; after {kl.updates[-1]} updates it is {fmt(kl.late)} nats from the reference" if kl else ""
    return Symptom(
        "serious",
        f"at most {clipped.peak:.2%} of the tokens are clipped, and an update moves the policy by at most "
        f"{fmt(moved.peak)} nats per token ({span(moved.peak_updates)}){distance}; the score does not rise",
        (scale("ppo.learning_rate", 10.0), scale("ppo.num_epochs", 2.0)),
    )


def _takes_steps(run: RunRecord) -> bool:
    """False if no learning rate could have moved the policy: its scores have no gradient, or its steps are skipped."""

    def is_always_one(name: str, *, of_policy: bool = False) -> bool:
        found = read(run, name, of_policy=of_policy)
        return found is not None and min(found.values) >= 1

    score = read(run, "reward/score_mean")
    score_std = read(run, "reward/score_std")
    if score and score_std and scores_are_constant(score, score_std):
        return False
    if compares_groups(run) and (is_always_one("group/constant") or is_always_one("group/single")):
        return False
    return not is_always_one("guard/skipped_steps", of_policy=True)


def _frozen(run: RunRecord) -> Symptom | None:
    """Symptom of a policy that still equals the reference in a run whose ratios are always 1.

    Its distance never exceeds that of a single update that is too small. A reference other than the initial policy, or
    rounding in bf16, hides it.
    """
    kl = read(run, "objective/kl", at_least=MIN_TREND, of_policy=True)
    length = read(run, "response/length")
    if kl is None or length is None or rose(read(run, "reward/score_mean")):
        return None
    farthest = max(abs(value) for value in kl.values)
    if farthest > NOT_MOVED * max(length.late, 1.0):
        return None
    return Symptom(
        "serious",
        f"the policy is never more than {fmt(farthest)} nats per response from the reference ({span(kl.updates)}); the "
        "score does not rise",
        (scale("ppo.learning_rate", 10.0),),
    )


def _has_further_steps(run: RunRecord) -> bool:
    """True if an update takes more than one step, since the first one's ratios are 1 at any learning rate.

    Not all settings of another library are known, but ratios other than 1 show further steps as well.
    """
    moved = read(run, "policy/approx_kl") if run.trainer else None
    is_seen = moved is not None and moved.peak > NOT_MOVED
    return is_seen or _num_epochs(run) > 1 or run.setting("ppo.num_minibatches") not in (None, 1)


NUM_FIRST = 2
"""Number of updates that are examined: the policy's first, and the first that measures a trained critic."""

CLIPPED = 0.15
MOVED = 0.05
"""Clip fraction, and KL in nats per token, above which one update moves too far. N+ stays below 0.07 and 0.008."""

RATIO = 50.0
"""Largest ratio of a token above which one update moves too far: it has become 50 times as likely, or its probability
was nearly 0."""

MOST = 0.5
"""Largest factor on the learning rate."""


@rule(
    "The first steps, at the full learning rate, move the policy or the critic further than one batch can justify. "
    "Later updates then repair what the first one broke, far from the reference.",
    needs=("policy/clip_fraction", "policy/approx_kl"),
    of_policy=True,
)
def first_update_too_large(run: RunRecord, clipped: Series, moved: Series) -> Symptom | None:
    """Seen: `policy/clip_fraction`, `policy/approx_kl` or `policy/ratio_max` of the policy's first update is high, or
    `value/explained_variance` of the second update is far below 0.

    Try: The learning rate of [steps_too_large](#steps_too_large), but no more than a half and no less than a tenth of
    the present one. If the critic is the cause, a third of `ppo.critic_learning_rate`, of `ppo.value_head_rate` or,
    without either, of `ppo.learning_rate`; and `ppo.value_warmup_updates=5`.

    Threshold: 15% clipped tokens, 0.05 nats per token, a ratio of 50, or an explained variance of −1 in the second
    update, no better than unrelated values, unless its returns have less than a tenth of the first's standard
    deviation. The tasks in `bench/defaults/RESULTS.md` have up to 5% and 0.005 nats at the preset's learning rate. The
    clip fraction does not count with `ppo.ratio=sequence` or `turn`. A running run says so once, after its first or
    second update, as a warning. From the fourth update on it is a note, or [steps_too_large](#steps_too_large) if the
    next updates are as large.
    """
    if steps_too_large.find(run) is not None:
        return None  # another rule, which covers more updates, reports it
    seen: list[str] = []
    remedies: list[Remedy] = []
    ratio = read(run, "policy/ratio_max", at_least=1, of_policy=True)
    far = ratio is not None and ratio.first > RATIO
    if (clipped.first > CLIPPED and not clips_sequences(run)) or moved.first > MOVED or far:
        seen.append(
            f"{span(clipped.updates[:1])} clips {clipped.first:.0%} of the tokens and moves the policy by "
            f"{fmt(moved.first)} nats per token" + (f", one token by a factor of {fmt(ratio.first)}" if ratio else "")
        )
        remedies += [*_fewer_epochs(run), smaller_rate(clipped=clipped.first, moved=moved.first, most=MOST)]
    if values := _values(run):
        seen.append(values)
        # If the policy has also moved too far, a lower rate for both has already been advised.
        remedies += [each for each in train_critic_less(run) if not (remedies and each is SMALLER_STEPS)]
    if not seen:
        return None
    return Symptom("note" if len(clipped) >= MIN_LEVEL else "warning", "; ".join(seen), remedies)


def _values(run: RunRecord) -> str:
    """Describe the damage that the first update did to the values; empty if they still beat unrelated ones, or have the
    weight that they deserve.
    """
    explained = read(run, "value/explained_variance", at_least=NUM_FIRST)
    if explained is None or explained.values[1] >= HARMFUL or not relies_on_critic(run):
        return ""
    if explained.updates[1] not in with_something_to_explain(run, explained).updates:
        return ""
    return (
        f"explained variance is {fmt(explained.values[1])} in {span(explained.updates[1:2])}, after the critic's first "
        "steps"
    )
