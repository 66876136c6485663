"""What was planned beside what a run held."""

from __future__ import annotations

import sys
from typing import Any

import torch

from kedge.logs.progress import say
from kedge.plan.machine import MachinePlan
from kedge.plan.machine_report import format_bytes

__all__ = ["compared"]


def compared(plan: MachinePlan | None, device: torch.device) -> dict[str, Any]:
    """What was planned and what the run held, bytes, for its summary; nothing without a plan."""
    if plan is None:
        return {}
    if device.type == "cuda":
        planned, measured = plan.peak.bytes, torch.cuda.max_memory_allocated(device)
    elif sys.platform == "win32":  # has no record of the peak
        return {}
    else:
        import resource

        unit = 1 if sys.platform == "darwin" else 2**10
        planned, measured = plan.needed, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    say(f"peak memory: {format_bytes(planned)} planned, {format_bytes(measured)} measured")
    return {"memory": {"planned_bytes": round(planned), "measured_bytes": measured, "phase": plan.peak.name}}
