"""Time and memory."""

from __future__ import annotations

from statistics import median

from kedge.inspect.doctor.finding import Rule, Symptom
from kedge.inspect.doctor.needs import Needs
from kedge.inspect.doctor.remedies import scale
from kedge.inspect.doctor.trends import MIN_LEVEL, MIN_TREND, Series, fmt, read
from kedge.inspect.record import RunRecord

__all__ = ["MEMORY_GROWING", "REWARD_DOMINATES_TIME"]

SCORING_SHARE = 0.5
"""Share of an update's time spent on scoring."""

SHORT_UPDATE = 0.5
"""Seconds; shorter updates are fast enough, regardless of what dominates them."""

WARMUP = 2
"""First updates, in which memory is allocated once and kept."""

GROWTH, GROWTH_GIB = 0.15, 0.1
"""Relative and absolute growth that counts as a leak: caches and longer responses take less."""

STEADY = 0.7
"""Share of updates with growth: a leak grows nearly every time, a cache once in a while."""

SINGLE_STEP = 0.5
"""Share of the total growth that one update may cause: the longest batch so far allocates its memory once."""

SUSTAINED = 0.65
"""Growth in the second half relative to the first. A leak does not slow down; caches, such as the one for kernels
compiled per shape, fill up."""


def _reward_dominates(run: RunRecord) -> Symptom | None:
    scoring, total = read(run, "time/reward"), read(run, "time/update")
    if scoring is None or total is None or total.late < SHORT_UPDATE or scoring.late < SCORING_SHARE * total.late:
        return None
    return Symptom(
        "warning",
        f"scoring takes {fmt(scoring.late)} of {fmt(total.late)} seconds per update ({scoring.late_span})",
        advice="make the reward function async or score the whole batch in one call; keep loaded models between calls",
    )


def _memory_growing(run: RunRecord) -> Symptom | None:
    for name, where in (("memory/process", "process"), ("memory/device", "device")):
        held = read(run, name, at_least=MIN_TREND + WARMUP)
        if held is not None and _leaks(settled := Series(held.updates[WARMUP:], held.values[WARMUP:])):
            return Symptom(
                "warning",
                f"{where} memory grows from {fmt(settled.values[0])} GiB after update {settled.updates[0]} to "
                f"{fmt(settled.values[-1])} GiB after update {settled.updates[-1]}, about "
                f"{fmt(1024 * median(settled.steps))} MiB per update",
                (scale(run, "reward_functions.memory_growth", 0.5),),
                "look for data that a reward function or a callback accumulates; until it is fixed, stopping and "
                "resuming with --resume frees the memory",
            )
    return None


def _leaks(held: Series) -> bool:
    first, half, last = held.values[0], held.values[len(held) // 2], held.values[-1]
    growth = last - first
    steady = sum(step > 0 for step in held.steps) >= STEADY * len(held.steps)
    gradual = max(held.steps) < SINGLE_STEP * growth
    return growth > max(GROWTH * first, GROWTH_GIB) and steady and gradual and last - half >= SUSTAINED * (half - first)


MEMORY_GROWING = Rule(
    "memory_growing",
    "Memory grows with every update and does not level off: a leak. The run will eventually be killed for it.",
    ("memory/process", "memory/device"),
    _memory_growing,
    Needs(("memory/process|memory/device",), MIN_TREND + WARMUP),
)

REWARD_DOMINATES_TIME = Rule(
    "reward_dominates_time",
    "Most of each update is spent waiting for the reward function.",
    ("time/reward", "time/update"),
    _reward_dominates,
    Needs(("time/reward", "time/update"), MIN_LEVEL),
)
