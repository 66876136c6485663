"""Sampler, time and memory: agreement of sampler and trainer, and the cost of an update."""

from __future__ import annotations

from statistics import median

from kedge_base.run_folder.record_format import MAX_RATIO
from kedge_inspect.doctor.rule import Symptom, adjust, rule, scale, set_to
from kedge_inspect.doctor.series import MIN_LEVEL, MIN_TREND, Series, combine, fmt, read
from kedge_inspect.record import RunRecord

RATIOS = {
    "policy/first_ratio_max": "the old logprobs and the first optimizer step, which has the same weights",
    "policy/sampler_ratio_max": "sampler and trainer",
}


def _beyond_rounding(run: RunRecord) -> tuple[str, Series] | None:
    """Describe the two sides with the largest ratio, and return their ratios that rounding does not explain."""
    bound = MAX_RATIO.get(run.facts.get("precision", ""), MAX_RATIO["bf16"])
    measured = {name: read(run, name, at_least=1) for name in RATIOS}
    if ages := read(run, "policy/staleness", at_least=1):
        # Different weights assign different probabilities, so only compare updates whose responses were sampled with
        # the weights being trained.
        names = ["policy/sampler_ratio_max"]
        if run.choice("ppo.old_logprobs") == "sampler":
            names.append("policy/first_ratio_max")
        for name in names:
            if ratios := measured[name]:
                measured[name] = combine(lambda ratio, age: None if age else ratio, ratios, ages)
    beyond = [(RATIOS[name], ratios.where(lambda ratio: ratio > bound)) for name, ratios in measured.items() if ratios]
    return max((each for each in beyond if each[1]), key=lambda each: max(each[1].values), default=None)


@rule(
    "Sampler and trainer compute different probabilities for the same tokens: different temperature, position ids or "
    "weights, active dropout, or rounding. Every ratio, every gradient and the KL are wrong by that factor.",
    needs=("|".join(RATIOS),),
)
def sampler_trainer_mismatch(run: RunRecord) -> Symptom | None:
    """Seen: `policy/first_ratio_max` or `policy/sampler_ratio_max` is too large in any update, or `incidents.jsonl` has
    a mismatch.

    Try: Compare weights, temperature, position ids and dropout of the two; `runtime.strict=true` stops the run at the
    first mismatch. In bf16, `runtime.precision=fp32` shows whether rounding is the cause.

    Threshold: A ratio of 1.01 in fp32 or 2 in bf16, the most that rounding explains; with `rollout.max_staleness`, of
    responses of the weights that are trained. Always serious.
    """
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
        (set_to("runtime.precision", "fp32", why="to see whether rounding is the cause"),) if bf16 else (),
        "check that sampler and trainer use the same weights, temperature and position ids, and that dropout is off; "
        "runtime.strict=true stops the run at the first mismatch",
    )


SCORING_SHARE = 0.5
"""Share of an update's time from which scoring dominates it."""

SHORT_UPDATE = 0.5
"""Duration in seconds below which an update is fast enough, regardless of what dominates it."""

WARMUP = 2
"""Number of first updates that are ignored, because they allocate memory once and keep it."""

GROWTH = 0.15
GROWTH_GIB = 0.1
"""Relative and absolute growth that counts as a leak: caches and longer responses need less."""

STEADY = 0.7
"""Share of updates with growth that makes it steady: a leak grows nearly every time, a cache once in a while."""

SINGLE_STEP = 0.5
"""Share of the total growth that one update may cause: the longest batch so far allocates its memory once."""

SUSTAINED = 0.65
"""Growth in the second half relative to the first. A leak does not slow down; caches, such as the one for kernels
compiled per shape, fill up."""


@rule(
    "Most of each update is spent waiting for the reward function.",
    needs=("time/reward", "time/update"),
    updates=MIN_LEVEL,
)
def reward_dominates_time(run: RunRecord, scoring: Series, total: Series) -> Symptom | None:
    """Seen: `time/reward` is most of `time/update`; with `rollout.max_staleness`, which scores in the background,
    also `time/waiting_for_rollout`.

    Try: Make the function async, or score the whole batch in one call; keep loaded models between calls.

    Threshold: Half of the update's time, for updates of at least half a second. A warning.
    """
    if waited := read(run, "time/waiting_for_rollout"):
        scoring = combine(min, scoring, waited) or scoring  # of work in the background, only the wait costs time
    if total.late < SHORT_UPDATE or scoring.late < SCORING_SHARE * total.late:
        return None
    return Symptom(
        "warning",
        f"scoring takes {fmt(scoring.late)} of {fmt(total.late)} seconds per update ({scoring.late_span})",
        advice="make the reward function async or score the whole batch in one call; keep loaded models between calls",
    )


@rule(
    "Memory grows with every update and does not level off: a leak. The run will eventually be killed for it.",
    needs=("memory/process|memory/device",),
    updates=MIN_TREND + WARMUP,
)
def memory_growing(run: RunRecord) -> Symptom | None:
    """Seen: `memory/process` or `memory/device` grows steadily.

    Try: Look for data that a reward function or a callback accumulates. Until then, stop and `--resume`, which frees
    the memory.

    Threshold: 15% and 0.1 GiB more than after the first two updates, with growth in 7 of 10 updates, less than half of
    it in a single one, and the second half growing at least 0.65 times as much as the first; caches level off instead.
    A warning.
    """
    for name, where in (("memory/process", "process"), ("memory/device", "device")):
        held = read(run, name, at_least=MIN_TREND + WARMUP)
        if held is not None and _leaks(settled := Series(held.updates[WARMUP:], held.values[WARMUP:])):
            return Symptom(
                "warning",
                f"{where} memory grows from {fmt(settled.values[0])} GiB after update {settled.updates[0]} to "
                f"{fmt(settled.values[-1])} GiB after update {settled.updates[-1]}, about "
                f"{fmt(1024 * median(settled.steps))} MiB per update",
                (),
                "look for data that a reward function or a callback accumulates; until it is fixed, stopping and "
                "resuming with --resume frees the memory",
            )
    return None


def _leaks(held: Series) -> bool:
    first = held.values[0]
    half = held.values[len(held) // 2]
    last = held.values[-1]
    growth = last - first
    steady = sum(step > 0 for step in held.steps) >= STEADY * len(held.steps)
    gradual = max(held.steps) < SINGLE_STEP * growth
    return growth > max(GROWTH * first, GROWTH_GIB) and steady and gradual and last - half >= SUSTAINED * (half - first)


TRUNCATED = 0.05
"""Share of tokens with a truncated importance weight above which the correction is too biased."""

EFFECTIVE = 0.5
"""Effective share of the tokens below which half of the sampling is wasted."""

BAND = (0.5, 2.0)
NARROW_BAND = (0.99, 1.01)
"""Ratios of tokens, and geometric means over responses, that `ppo.importance_mask` keeps by default."""

LONG = 100
"""Number of tokens from which the noise of single tokens averages out in a response's geometric mean."""

WAITING = 1 / 3
"""Share of an update's time that a side may wait."""


def _samples_ahead(run: RunRecord) -> bool:
    return bool(run.setting("rollout.max_staleness"))


@rule(
    "The policy has moved far from the weights that sampled. Importance weights correct for it, but they vary so much "
    "that few tokens count, and where they are truncated the gradient is biased.",
    needs=("policy/sampler_share",),
    updates=MIN_LEVEL,
    fits=_samples_ahead,
)
def rollout_too_old(run: RunRecord, share: Series) -> Symptom | None:
    """Seen: With `rollout.max_staleness`: `policy/sampler_truncated` or `policy/sampler_masked` is high, or
    `policy/sampler_share` is low.

    Try: Lower `rollout.max_staleness`; lower `ppo.learning_rate`.

    Threshold: In the last quarter of the run, more than 5% of the weights truncated, more than half of the tokens
    masked, or an effective share of the tokens below one half. A warning.
    """
    truncated = read(run, "policy/sampler_truncated")
    masked = read(run, "policy/sampler_masked")
    seen: list[str] = []
    if truncated is not None and truncated.late > TRUNCATED:
        seen.append(f"{truncated.late:.0%} of the importance weights are truncated")
    if masked is not None and masked.late > 1 - EFFECTIVE:
        seen.append(f"ppo.importance_mask leaves out {masked.late:.0%} of the tokens")
    if share.late < EFFECTIVE:
        seen.append(f"the tokens count as {share.late:.0%} of their number")
    staleness = run.setting("rollout.max_staleness")
    if not seen or not isinstance(staleness, int):
        return None
    return Symptom(
        "warning",
        f"{' and '.join(seen)} ({share.late_span})",
        (set_to("rollout.max_staleness", staleness - 1, "too_high"), scale("ppo.learning_rate", 0.5)),
        "smaller steps of the policy also make old responses less harmful",
    )


def _outside(run: RunRecord, name: str, band: tuple[float, float]) -> str:
    """Describe the quantiles of a ratio late in the run if one is outside a band; otherwise empty."""
    ends = [read(run, f"policy/sampler_{name}_p{percent}") for percent in ("01", "99")]
    if ends[0] is None or ends[1] is None or (band[0] <= ends[0].late and ends[1].late <= band[1]):
        return ""
    return f"{fmt(ends[0].late)} at 1% and {fmt(ends[1].late)} at 99% ({ends[0].late_span})"


@rule(
    "Sampler and trainer give some tokens or responses very different probabilities. Truncated importance weights keep "
    "these in the loss, and those that the trainer finds unlikely are not truncated at all.",
    needs=("policy/sampler_ratio_p01", "policy/sampler_ratio_p99"),
    updates=MIN_LEVEL,
    # The sampler is not exact, and no mask acts on the ratios.
    fits=lambda run: (
        run.setting("ppo.importance_mask") is None and any("policy/sampler_ratio_p01" in row for row in run.metrics)
    ),
)
def sampler_ratios_wide(run: RunRecord, low: Series, high: Series) -> Symptom | None:
    """Seen: Without `ppo.importance_mask`: the quantiles of the raw ratio of trainer to sampler, of tokens or of
    responses.

    Try: `ppo.old_logprobs.cap=auto` if no weights are used; then `token` for `ppo.importance_mask` if it is single
    tokens that differ, `sequence` if it is whole responses.

    Threshold: In the last quarter of the run, more than 1% of the tokens below 0.5 or above 2: a warning. More than 1%
    of the responses with a geometric mean below 0.99 or above 1.01, if they have 100 tokens or more and were sampled by
    the weights that are trained: a note.
    """
    weighs = set_to("ppo.old_logprobs.cap", "auto", why="to weigh tokens by the ratio, truncated")
    old = run.setting("ppo.old_logprobs")
    # Earlier runs have `importance_cap`.
    was_off = old == "trainer" and run.config["ppo"].get("importance_cap", old) is None
    first = [weighs] if was_off or old == {"trainer": None} else []
    if seen := _outside(run, "ratio", BAND):
        mask = set_to("ppo.importance_mask", "token", why="to leave out tokens outside 0.5 to 2")
        return Symptom("warning", f"the ratio of a token's probabilities is {seen}", (*first, mask))
    length = read(run, "response/length")
    is_long = length is not None and length.late >= LONG
    if is_long and not _samples_ahead(run) and (seen := _outside(run, "response", NARROW_BAND)):
        mask = set_to("ppo.importance_mask", "sequence", why="to leave out responses outside 0.99 to 1.01")
        return Symptom("note", f"the geometric mean of a response's ratios is {seen}", (*first, mask))
    return None


@rule(
    "Sampling ahead hides the shorter of rollout and training behind the longer one. Where one side takes far longer, "
    "the devices of the other are idle.",
    needs=("time/waiting_for_rollout", "time/rollout_waiting", "time/update"),
    updates=MIN_LEVEL,
    fits=_samples_ahead,
)
def one_side_waits(run: RunRecord, training: Series, sampling: Series, total: Series) -> Symptom | None:
    """Seen: With `rollout.max_staleness`: `time/waiting_for_rollout` or `time/rollout_waiting` is a large part of
    `time/update`.

    Try: Give the side that is waited for more of the devices. If training waits, also `rollout.engine=vllm`; if
    sampling waits, `rollout.max_staleness=0` where both can use the same ones.

    Threshold: A third of the update's time, for updates of at least half a second. A note. Checked on synthetic runs
    only.
    """
    if total.late < SHORT_UPDATE:
        return None
    faster = set_to("rollout.engine", "vllm")
    if run.choice("rollout.engine") != "builtin":
        faster = adjust("rollout.engine.devices", "too_low")
    at_once = set_to("rollout.max_staleness", 0, why="if both sides can use the same devices")
    for waited, side, awaited, other, remedy in (
        (training, "training", "responses", "sampling", faster),
        (sampling, "sampling", "weights", "training", at_once),
    ):
        if waited.late > WAITING * total.late:
            return Symptom(
                "note",
                f"{side} waits {fmt(waited.late)} of {fmt(total.late)} seconds per update for {awaited} "
                f"({total.late_span})",
                (remedy,),
                f"give {other} more of the devices",
            )
    return None
