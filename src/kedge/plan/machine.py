"""What a stage holds on one machine, by phase, role and kind, and how long its phases take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

__all__ = ["KINDS", "MachinePlan", "Part", "Phase", "Speed", "merged"]

KINDS: Final = (
    "weights",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "key–value cache",
    "rollout buffers",
)
"""What memory is for, in the order of a report. Logits include the value heads and the losses."""


@dataclass(frozen=True)
class Part:
    """Bytes of one kind that one role holds.

    Attributes:
        role: policy, critic, reference, a reward model; or the run.
        kind: One of `KINDS`.
        bytes: How many.
    """

    role: str
    kind: str
    bytes: float


@dataclass(frozen=True)
class Phase:
    """A phase of an update, or of a step.

    Attributes:
        name: As in `time/NAME` of the metrics, where there is one.
        parts: What is held at its peak.
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
class Speed:
    """How fast a machine computes.

    Attributes:
        flops: Of matrix products in the run's precision, FLOP/s.
        bandwidth: Of memory, for everything else, byte/s.
        functions: The same of operations that compute a function such as exp of every number, byte/s.
        call: Seconds of overhead per operation.
        origin: Where the figures are from.
    """

    flops: float
    bandwidth: float
    functions: float
    call: float
    origin: str

    def seconds(self, figures: Mapping[str, float], prefix: str, times: float = 1.0) -> float:
        """Seconds of a counted pass, `PREFIX.flops`, `.bytes`, `.functions` and `.calls`, so many times."""
        flops, size, functions, calls = (
            figures[f"{prefix}.{name}"] for name in ("flops", "bytes", "functions", "calls")
        )
        return times * (flops / self.flops + size / self.bandwidth + functions / self.functions + calls * self.call)


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


def merged(parts: Iterable[Part]) -> tuple[Part, ...]:
    """The parts with those of the same role and kind added up, without empty ones, by kind."""
    sums: dict[tuple[str, str], float] = {}
    for part in parts:
        sums[part.role, part.kind] = sums.get((part.role, part.kind), 0.0) + part.bytes
    found = [Part(role, kind, size) for (role, kind), size in sums.items() if size > 0]
    return tuple(sorted(found, key=lambda part: KINDS.index(part.kind)))
