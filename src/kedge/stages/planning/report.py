"""The plan of a stage on one machine: memory, time, and its text."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch

from kedge.logs.progress import say
from kedge.stages.planning.devices import Device

__all__ = [
    "KINDS",
    "MachinePlan",
    "Part",
    "Phase",
    "compared",
    "format_bytes",
    "machine_report",
    "peak_line",
    "verdict",
]

GIB = 2**30
SHOWN = 2**14
"""Bytes below which a row is left out."""
NEAR = 0.9
"""Share of the memory above which a plan warns that it may not fit."""

UNITS: Final[Mapping[str, str]] = MappingProxyType({"ppo": "update", "critic": "part"})
"""The unit of a plan's time, where it is not an optimizer step: for a critic, the responses sampled together."""
KINDS: Final = (
    "weights",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "key–value cache",
    "rollout buffers",
)
"""Uses of memory, in the order of a report. Logits include the value heads and the losses."""


@dataclass(frozen=True)
class Part:
    """Bytes of one kind that one role holds.

    Attributes:
        role: policy, critic, reference, a reward model; or the run.
        kind: One of `KINDS`.
        bytes: Size.
    """

    role: str
    kind: str
    bytes: float


@dataclass(frozen=True)
class Phase:
    """A phase of an update, or of a step.

    Attributes:
        name: As in `time/NAME` of the metrics, where there is one.
        parts: The contents at its peak.
        seconds: Its time per update or step; None if it is not known.
    """

    name: str
    parts: tuple[Part, ...]
    seconds: float | None = None

    @property
    def bytes(self) -> float:
        """The peak."""
        return sum(part.bytes for part in self.parts)


@dataclass(frozen=True)
class MachinePlan:
    """The plan of a stage.

    Attributes:
        stage: The stage.
        phases: Its phases in the order of an update.
        updates: Updates or optimizer steps of the run; None if unknown.
        sft_steps: Cost of an update in optimizer steps of supervised fine-tuning on the same tokens; None for others.
        process: Bytes that the process holds besides tensors.
        overhead: Share of the tensors' bytes that the allocator adds.
    """

    stage: str
    phases: tuple[Phase, ...]
    updates: int | None = None
    sft_steps: float | None = None
    process: float = 0.0
    overhead: float = 0.0

    @property
    def peak(self) -> Phase:
        """The phase that holds the most."""
        return max(self.phases, key=lambda phase: phase.bytes)

    @property
    def needed(self) -> float:
        """Bytes of the process at its peak."""
        return self.process + self.peak.bytes * (1 + self.overhead)

    @property
    def seconds(self) -> float | None:
        """Per update or step."""
        known = [phase.seconds for phase in self.phases if phase.seconds is not None]
        return sum(known) if known else None

    @property
    def whole(self) -> float | None:
        """Seconds of the run."""
        return None if self.seconds is None or self.updates is None else self.seconds * self.updates


def machine_report(
    plan: MachinePlan,
    device: Device,
    heads: Sequence[str],
    alternatives: Mapping[str, MachinePlan],
    *,
    price_per_hour: float | None = None,
) -> str:
    """A run's memory by phase, its fit, time and cost, and changes that would help."""
    lines = [*heads, "", peak_line(plan, device), "", *_table(plan)]
    if plan.seconds is not None:
        lines += ["", *_times(plan, price_per_hour)]
    if alternatives:
        lines += ["", *_alternatives(plan, device, alternatives)]
    return "\n".join(lines)


def peak_line(plan: MachinePlan, device: Device) -> str:
    """The peak, its phase and the verdict, on one line."""
    rest = "the process" if plan.process else "the allocator"
    process = f", {format_bytes(plan.needed)} with {rest}" if plan.process or plan.overhead else ""
    room = "" if device.memory is None else f" into {format_bytes(device.memory)} ({device.bound})"
    peak = f"{format_bytes(plan.peak.bytes)} in {plan.peak.name}{process}"
    return f"peak memory: {peak}; {verdict(plan, device)}{room}"


def verdict(plan: MachinePlan, device: Device) -> str:
    """True if the plan fits."""
    if device.memory is None:
        return "the memory of this device is unknown"
    if plan.needed > device.memory:
        return "does not fit"
    return "may not fit" if plan.needed > NEAR * device.memory else "fits"


def format_bytes(size: float) -> str:
    """Format bytes, such as `1.9 GiB` or `340 MiB`."""
    return f"{size / GIB:,.1f} GiB" if size >= GIB else f"{size / 2**20:,.0f} MiB"


def format_seconds(seconds: float) -> str:
    """Format seconds, such as `0.8 s`, `12 min` or `3.5 h`."""
    if seconds < 100:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:,.1f} h"


def compared(plan: MachinePlan | None, device: torch.device) -> dict[str, Any]:
    """The planned and the measured peak in bytes, for the run's summary; empty without a plan."""
    if plan is None:
        return {}
    if device.type == "cuda":
        planned = plan.peak.bytes
        measured = torch.cuda.max_memory_allocated(device)
    elif sys.platform == "win32":  # has no record of the peak
        return {}
    else:
        import resource

        unit = 1 if sys.platform == "darwin" else 2**10
        planned = plan.needed
        measured = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    say(f"peak memory: {format_bytes(planned)} planned, {format_bytes(measured)} measured")
    return {"memory": {"planned_bytes": round(planned), "measured_bytes": measured, "phase": plan.peak.name}}


def _table(plan: MachinePlan) -> Iterator[str]:
    shown = (part for phase in plan.phases for part in phase.parts if part.bytes >= SHOWN)
    keys = dict.fromkeys((part.role, part.kind) for part in shown)
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


def _alternatives(plan: MachinePlan, device: Device, alternatives: Mapping[str, MachinePlan]) -> Iterator[str]:
    yield "instead:"
    width = max(map(len, alternatives))
    for settings, other in alternatives.items():
        change = other.peak.bytes / plan.peak.bytes - 1
        time = ""
        if other.seconds is not None and plan.seconds:
            time = f"; time {100 * (other.seconds / plan.seconds - 1):+.0f} %"
        fits = "" if device.memory is None else f"; {verdict(other, device)}"
        yield f"  {settings:<{width}}  {format_bytes(other.peak.bytes):>9} ({100 * change:+.0f} %){time}{fits}"
