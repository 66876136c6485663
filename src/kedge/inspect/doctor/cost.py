"""Time and memory."""

from __future__ import annotations

from statistics import median

from kedge.inspect.doctor.courses import TREND, Course, course, figure
from kedge.inspect.doctor.finding import Rule, Symptom
from kedge.inspect.doctor.remedies import scale
from kedge.inspect.record import RunRecord

__all__ = ["MEMORY_GROWING", "REWARD_DOMINATES_TIME"]

MOST = 0.5
"""Share of an update's time that goes into scoring."""

WORTH_A_WORD = 0.5
"""Seconds of an update below which nobody minds."""

WARM = 2
"""First updates, in which memory is taken once and for all."""

GROWTH, GROWTH_GIB = 0.15, 0.1
"""How much more memory at the end than at the start is a leak: caches and longer responses are less."""

STEADY = 0.7
"""Share of the updates at which it grows: a leak grows nearly each time, a cache once in a while."""

AT_ONCE = 0.5
"""Share of the whole growth that one update may bring: a longer batch than any before takes its room once."""

UNSLOWED = 0.65
"""Growth in the second half, in that of the first. A leak does not slow down; caches, such as that of kernels compiled
for each new shape, fill up."""


def _reward_dominates(run: RunRecord) -> Symptom | None:
    scoring, whole = course(run, "time/reward"), course(run, "time/update")
    if scoring is None or whole is None or whole.late < WORTH_A_WORD or scoring.late < MOST * whole.late:
        return None
    return Symptom(
        "warning",
        f"scoring takes {figure(scoring.late)} of {figure(whole.late)} seconds of an update ({scoring.late_span})",
        advice="make the function async or let it score a whole batch in one call; keep what it loads between calls",
    )


def _memory_growing(run: RunRecord) -> Symptom | None:
    for name, what in (("memory/process", "the process"), ("memory/device", "the device")):
        held = course(run, name, least=TREND + WARM)
        if held is not None and _leaks(settled := Course(held.updates[WARM:], held.figures[WARM:])):
            steps = [after - before for before, after in zip(settled.figures, settled.figures[1:], strict=False)]
            return Symptom(
                "warning",
                f"{what} holds {figure(settled.figures[-1])} GiB after update {settled.updates[-1]}, "
                f"{figure(settled.figures[0])} after update {settled.updates[0]}: "
                f"{figure(1024 * median(steps))} MiB more with each",
                (scale(run, "reward_functions.memory_growth", 0.5),),
                "look for what a reward function or a callback keeps; a checkpoint and --resume give it all back",
            )
    return None


def _leaks(held: Course) -> bool:
    steps = [after - before for before, after in zip(held.figures, held.figures[1:], strict=False)]
    first, half, last = held.figures[0], held.figures[len(held) // 2], held.figures[-1]
    grown = last - first
    steady = sum(step > 0 for step in steps) >= STEADY * len(steps) and max(steps) < AT_ONCE * grown
    return grown > max(GROWTH * first, GROWTH_GIB) and steady and last - half >= UNSLOWED * (half - first)


MEMORY_GROWING = Rule(
    "memory_growing",
    "Something is kept from each update that nobody needs again, until the machine has no more.",
    ("memory/process", "memory/device"),
    _memory_growing,
)

REWARD_DOMINATES_TIME = Rule(
    "reward_dominates_time",
    "The run waits for its reward function: everything else could be twice as fast and nobody would notice.",
    ("time/reward", "time/update"),
    _reward_dominates,
)
