"""Compares the memory that was planned for a run with the measured peak."""

from __future__ import annotations

import sys
from typing import Any, Protocol

import torch

from kedge_base.machine.memory import with_unit
from kedge_base.machine.progress import say


class PlannedMemory(Protocol):
    """The memory that a run was planned to use."""

    @property
    def peak(self) -> Any:
        """The phase that holds the most memory: `name`, as in the metric `time/NAME`, and `bytes` of its tensors."""
        ...

    @property
    def needed(self) -> float:
        """Peak memory of the process in bytes."""
        ...


def compared(plan: PlannedMemory | None, device: torch.device) -> dict[str, Any]:
    """The planned and the measured peak in bytes, for the run's summary; empty without a plan."""
    if plan is None:
        return {}
    if device.type == "cuda":
        planned = plan.peak.bytes
        measured = torch.cuda.max_memory_allocated(device)
    elif sys.platform == "win32":  # keeps no record of the peak
        return {}
    else:
        import resource

        unit = 1 if sys.platform == "darwin" else 2**10
        planned = plan.needed
        measured = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    say(f"peak memory: {with_unit(planned)} planned, {with_unit(measured)} measured")
    return {"memory": {"planned_bytes": round(planned), "measured_bytes": measured, "phase": plan.peak.name}}
