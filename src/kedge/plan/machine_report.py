"""A machine's plan as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from kedge.plan.devices import Device
from kedge.plan.machine import KINDS, MachinePlan, Part

__all__ = ["Alternative", "format_bytes", "format_seconds", "machine_report", "peak_line", "verdict"]

GIB = 2**30
NEAR = 0.9
"""Share of the memory above which a plan says that it may not fit."""

UNITS: Final[Mapping[str, str]] = MappingProxyType({"ppo": "update", "critic": "part"})
"""What a plan's time is for, where it is not an optimizer step: a critic's part is what is sampled together."""


@dataclass(frozen=True)
class Alternative:
    """A change of settings, and the plan with it.

    Attributes:
        settings: As on the command line.
        plan: The plan.
    """

    settings: str
    plan: MachinePlan


def machine_report(
    plan: MachinePlan,
    device: Device,
    heads: Sequence[str],
    alternatives: Sequence[Alternative],
    *,
    price_per_hour: float | None = None,
) -> str:
    """What a run holds by phase, whether that fits, how long it takes, what it costs, and what would change it."""
    lines = [*heads, "", peak_line(plan, device), "", *_table(plan)]
    if plan.seconds is not None:
        lines += ["", *_times(plan, price_per_hour)]
    if alternatives:
        lines += ["", *_alternatives(plan, device, alternatives)]
    return "\n".join(lines)


def peak_line(plan: MachinePlan, device: Device) -> str:
    """The peak, its phase and whether it fits, in one line."""
    rest = "the process" if plan.process else "the allocator"
    process = f", {format_bytes(plan.needed)} with {rest}" if plan.process or plan.overhead else ""
    room = "" if device.memory is None else f" into {format_bytes(device.memory)} ({device.bound})"
    peak = f"{format_bytes(plan.peak.bytes)} in {plan.peak.name}{process}"
    return f"peak memory: {peak}; {verdict(plan, device)}{room}"


def verdict(plan: MachinePlan, device: Device) -> str:
    """Whether the plan fits."""
    if device.memory is None:
        return "the memory of this device is unknown"
    if plan.needed > device.memory:
        return "does not fit"
    return "may not fit" if plan.needed > NEAR * device.memory else "fits"


def format_bytes(size: float) -> str:
    """Such as `1.9 GiB` or `340 MiB`."""
    return f"{size / GIB:,.1f} GiB" if size >= GIB else f"{size / 2**20:,.0f} MiB"


def format_seconds(seconds: float) -> str:
    """Such as `0.8 s`, `12 min` or `3.5 h`."""
    if seconds < 100:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:,.1f} h"


def _table(plan: MachinePlan) -> Iterator[str]:
    keys = dict.fromkeys((part.role, part.kind) for phase in plan.phases for part in phase.parts)
    rows = sorted(keys, key=lambda key: KINDS.index(key[1]))
    names = [f"{kind}, {role}" for role, kind in rows]
    width = max(map(len, (*names, "sum")))
    phases = [phase.name for phase in plan.phases]
    yield f"{'MiB':<{width}}  " + "  ".join(f"{name:>10}" for name in phases)
    for name, (role, kind) in zip(names, rows, strict=True):
        yield f"{name:<{width}}  " + "  ".join(_cell(phase.parts, role, kind) for phase in plan.phases)
    yield f"{'sum':<{width}}  " + "  ".join(f"{phase.bytes / 2**20:>10,.0f}" for phase in plan.phases)


def _cell(parts: Sequence[Part], role: str, kind: str) -> str:
    size = sum(part.bytes for part in parts if (part.role, part.kind) == (role, kind))
    return f"{size / 2**20:>10,.0f}" if size >= 2**19 else f"{'' if size == 0 else '<1':>10}"


def _times(plan: MachinePlan, price_per_hour: float | None) -> Iterator[str]:
    assert plan.seconds is not None
    known = [(phase.name, phase.seconds) for phase in plan.phases if phase.seconds]
    shares = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in known)
    unit = UNITS.get(plan.stage, "step")
    yield f"time per {unit}: about {format_seconds(plan.seconds)} ({shares})"
    if plan.sft_steps is not None:
        yield f"cost per {unit}: {plan.sft_steps:.1f} steps of supervised fine-tuning on the same tokens"
    if plan.whole is not None:
        money = (
            ""
            if price_per_hour is None
            else f", {plan.whole / 3600 * price_per_hour:,.2f} at {price_per_hour:g} per hour"
        )
        yield f"the run: {plan.updates:,} {unit}s, about {format_seconds(plan.whole)}{money}"


def _alternatives(plan: MachinePlan, device: Device, alternatives: Sequence[Alternative]) -> Iterator[str]:
    yield "instead:"
    width = max(len(each.settings) for each in alternatives)
    for each in alternatives:
        change = each.plan.peak.bytes / plan.peak.bytes - 1
        time = ""
        if each.plan.seconds is not None and plan.seconds:
            time = f"; time {100 * (each.plan.seconds / plan.seconds - 1):+.0f} %"
        fits = "" if device.memory is None else f"; {verdict(each.plan, device)}"
        yield f"  {each.settings:<{width}}  {format_bytes(each.plan.peak.bytes):>9} ({100 * change:+.0f} %){time}{fits}"
