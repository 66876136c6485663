"""This machine as a device of a plan: its memory, and how fast it computes."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from kedge.memory import MemoryLimit, held_memory, memory_limits
from kedge.models import Precision, autocast
from kedge.plan.devices import Device
from kedge.plan.machine import Speed
from kedge.training.runtime import resolve_device

__all__ = ["measured_speed", "this_machine"]

SIDE, STREAMED, REPEATS = 768, 2**23, 3
CALLS = 200


def this_machine(device_name: str = "auto") -> Device:
    """The device that the run would have, with the memory that it can have at all: limit, not what is free now."""
    device = resolve_device(device_name)
    if device.type == "cuda":
        memory = float(torch.cuda.get_device_properties(device).total_memory)
        name = torch.cuda.get_device_name(device)
        return Device(name, memory, accelerator=True, is_this=True, bound=f"the memory of {name}")
    found = min(((_room(each), each.name) for each in memory_limits()), default=None)
    kind = "CPU" if device.type == "cpu" else device.type
    memory, bound = (None, "") if found is None else found
    return Device(f"this machine's {kind}", memory, accelerator=device.type != "cpu", is_this=True, bound=bound)


def _room(limit: MemoryLimit) -> float:
    """What the process can hold under a limit, other processes aside; `ulimit` counts what it merely has mapped."""
    mapped = limit.used - held_memory() if limit.name.startswith("ulimit") else 0
    return float(limit.limit - mapped)


def measured_speed(device: torch.device, precision: Precision) -> Speed:
    """Time matrix products, copies and small operations, in less than two seconds."""
    with torch.no_grad(), autocast(precision, device):
        factor = nn.Linear(SIDE, SIDE, bias=False, device=device)
        rows = torch.randn(SIDE, SIDE, device=device)
        flops = 2 * SIDE**3 / _seconds(lambda: factor(rows), device)
        numbers = torch.zeros(STREAMED, device=device)
        bandwidth = 3 * numbers.nbytes / _seconds(lambda: torch.add(numbers, numbers), device)
        small = torch.zeros(16, device=device)

        def many() -> Tensor:
            each = small
            for _ in range(CALLS):
                each = each + small
            return each

        call = _seconds(many, device) / CALLS
    return Speed(flops, bandwidth, call, "measured on this machine")


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """The fastest of a few runs after one that allocates memory."""
    times = []
    for _ in range(REPEATS + 1):
        started = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return min(times[1:])
