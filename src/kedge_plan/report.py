"""The plan of a stage on one machine: memory, time, and its text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kedge.models.live_bytes import Label
from kedge_base.machine.memory import with_unit
from kedge_base.machine.progress import format_duration, format_figure
from kedge_plan.devices import Device

SHOWN = 2**14
"""Rows with fewer bytes are left out."""
NEAR = 0.9
"""Share of the memory above which a plan warns that it may not fit."""
KINDS = ("weights", "gradients", "optimizer", "activations", "logits", "key–value cache", "rollout buffers")
"""Uses of memory, in the order of a report. Logits include the value heads and the losses."""


@dataclass(frozen=True)
class PlannedPhase:
    """A phase of an update, or of a step.

    Attributes:
        name: The name in the metric `time/NAME`, if there is one.
        held: Bytes at the peak by kind, one of `KINDS`, and role: policy, critic, reference, a reward model or the run.
        seconds: Time per update or step; None if unknown.
    """

    name: str
    held: Mapping[Label, float]
    seconds: float | None = None

    @property
    def bytes(self) -> float:
        """The peak."""
        return sum(self.held.values())


@dataclass(frozen=True)
class MachinePlan:
    """The plan of a stage.

    Attributes:
        stage: The stage.
        unit: The unit that the stage repeats: an update, a part or a step.
        phases: The phases in the order of an update.
        updates: Updates or optimizer steps of the run; None if unknown.
        sft_steps: Cost of a PPO update, in optimizer steps of supervised fine-tuning on the same tokens; else None.
        process: Bytes that the process holds besides tensors.
        overhead: Share of the tensors' bytes that the allocator adds.
        recomputes: Activations are recomputed.
    """

    stage: str
    unit: str
    phases: tuple[PlannedPhase, ...]
    updates: int | None = None
    sft_steps: float | None = None
    process: float = 0.0
    overhead: float = 0.0
    recomputes: bool = False

    @property
    def peak(self) -> PlannedPhase:
        """The phase that holds the most."""
        return max(self.phases, key=lambda phase: phase.bytes)

    @property
    def needed(self) -> float:
        """Peak memory of the process in bytes."""
        return self.process + self.peak.bytes * (1 + self.overhead)

    def excess(self, room: float) -> float:
        """Bytes that the phases lack, in all, to be sure to fit into this many bytes."""
        return sum(max(0.0, self.process + phase.bytes * (1 + self.overhead) - NEAR * room) for phase in self.phases)

    @property
    def seconds(self) -> float | None:
        """Seconds per update or step."""
        known = [phase.seconds for phase in self.phases if phase.seconds is not None]
        return sum(known) if known else None

    @property
    def whole(self) -> float | None:
        """Seconds of the whole run."""
        return None if self.seconds is None or self.updates is None else self.seconds * self.updates


def machine_report(
    plan: MachinePlan,
    device: Device,
    heads: Sequence[str],
    alternatives: Mapping[str, MachinePlan],
    *,
    price_per_hour: float | None,
    remedies: Mapping[str, MachinePlan],
    command: str,
) -> str:
    """A run's memory by phase, its fit, time and cost, and changes that would help.

    Args:
        plan: The plan.
        device: Its device.
        heads: The first lines.
        alternatives: Plans with other settings, by setting.
        price_per_hour: The device's price.
        remedies: Plans towards a fit, if this one does not; by settings.
        command: The command without these settings.
    """
    lines = [*heads, "", peak_line(plan, device), "", *_table(plan)]
    if plan.seconds is not None:
        lines += ["", *_times(plan, price_per_hour)]
    if alternatives:
        lines += ["", *_alternatives(plan, device, alternatives)]
    if remedies:
        lines += ["", "to make it fit, by what it costs (time, then rounding, then what is trained):"]
        for settings, other in remedies.items():
            lines.append(f"  {with_unit(other.needed):>8}, {_verdict(other, device)}: {command} {settings}")
    return "\n".join(lines)


def peak_line(plan: MachinePlan, device: Device) -> str:
    """The peak, its phase and the verdict, on one line."""
    rest = "the process" if plan.process else "the allocator"
    process = f", {with_unit(plan.needed)} with {rest}" if plan.process or plan.overhead else ""
    free = "" if device.free is None else f"the {with_unit(device.free)} that are free of "
    room = "" if device.memory is None else f" into {free}{with_unit(device.memory)} ({device.bound})"
    how = ", activations recomputed" if plan.recomputes else ""
    peak = f"{with_unit(plan.peak.bytes)} in {plan.peak.name}{process}{how}"
    return f"peak memory: {peak}; {_verdict(plan, device)}{room}"


def _verdict(plan: MachinePlan, device: Device) -> str:
    if device.memory is None:
        return "the memory of this device is unknown"
    return "does not fit" if plan.needed > device.room else "may not fit" if plan.excess(device.room) else "fits"


def _table(plan: MachinePlan) -> Iterator[str]:
    shown = dict.fromkeys(label for phase in plan.phases for label, size in phase.held.items() if size >= SHOWN)
    rows = {", ".join(label): label for label in sorted(shown, key=lambda label: KINDS.index(label[0]))}
    width = max(map(len, rows))
    yield f"{'MiB':<{width}}  " + "  ".join(f"{phase.name:>10}" for phase in plan.phases)
    for name, label in rows.items():
        yield f"{name:<{width}}  " + "  ".join(_cell(phase.held.get(label, 0.0)) for phase in plan.phases)
    yield f"{'sum':<{width}}  " + "  ".join(f"{phase.bytes / 2**20:>10,.0f}" for phase in plan.phases)


def _cell(size: float) -> str:
    return f"{size / 2**20:>10,.0f}" if size >= 2**19 else f"{'<1' if size else '':>10}"


def _times(plan: MachinePlan, price_per_hour: float | None) -> Iterator[str]:
    shares = ", ".join(f"{phase.name} {format_figure(phase.seconds)} s" for phase in plan.phases if phase.seconds)
    yield f"time per {plan.unit}: about {format_figure(plan.seconds)} s ({shares})"
    if plan.sft_steps is not None:
        yield f"cost per {plan.unit}: {plan.sft_steps:.1f} steps of supervised fine-tuning on the same tokens"
    if plan.whole is not None:
        run = f"the run: {plan.updates:,} {plan.unit}s, about {format_duration(plan.whole)}"
        if price_per_hour is not None:
            run += f", {plan.whole / 3600 * price_per_hour:,.2f} at {price_per_hour:g} per hour"
        yield run


def _alternatives(plan: MachinePlan, device: Device, alternatives: Mapping[str, MachinePlan]) -> Iterator[str]:
    yield "instead:"
    width = max(map(len, alternatives))
    for settings, other in alternatives.items():
        change = other.needed / plan.needed - 1
        time = f"; time {other.seconds / plan.seconds - 1:+.0%}" if other.seconds and plan.seconds else ""
        fits = "" if device.memory is None else f"; {_verdict(other, device)}"
        yield f"  {settings:<{width}}  {with_unit(other.needed):>8} ({change:+.0%}){time}{fits}"
