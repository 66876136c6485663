"""This machine as a device of a plan: its memory, and how fast it computes."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor, nn

from kedge.config import Config, with_values
from kedge.models import Precision, autocast
from kedge.plan.devices import Device
from kedge.plan.machine import Speed
from kedge.system.memory import MemoryLimit, held_memory, memory_limits
from kedge.training.runtime import keep_freed_memory, resolve_device

__all__ = ["as_on", "has_own_memory", "measured_speed", "this_machine"]

ROWS, WIDEST, STREAMED = 512, 4096, 2**20
"""Rows and widest matrix of the product, and numbers of the stream: four megabytes, as activations have."""
CALLS, REPEATS = 500, 5
REACHED = 0.70
"""Share of these speeds that updates reach: the rest is Python, metrics and logs. Median of `python -m bench.plan`."""


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
    is_accelerator = device.type != "cpu"
    return Device(
        f"this machine's {kind}", memory, is_accelerator, is_this=True, shares_memory=is_accelerator, bound=bound
    )


def has_own_memory(device: Device) -> bool:
    """Whether it is a GPU whose contents can be in the host's memory instead."""
    return device.accelerator and not device.shares_memory


def as_on(device: Device, config: Config) -> Config:
    """The configuration without what has no effect on a device."""
    if config.runtime.offload_optimizer and not has_own_memory(device):
        return with_values(config, {"runtime.offload_optimizer": False})
    return config


def _room(limit: MemoryLimit) -> float:
    """What the process can hold under a limit, other processes aside; `ulimit` counts what it merely has mapped."""
    mapped = limit.used - held_memory() if limit.name.startswith("ulimit") else 0
    return float(limit.limit - mapped)


def measured_speed(
    device: torch.device,
    precision: Precision,
    *,
    width: int = 1024,
    clock: Callable[[], float] = time.perf_counter,
) -> Speed:
    """Time matrix products, copies and small operations, in less than two seconds.

    Args:
        device: Where.
        precision: Of the products.
        width: Of the model: products of small matrices are slower.
        clock: Seconds.
    """
    keep_freed_memory()  # as a run does; a new page costs more than what is computed on it
    rows = torch.randn(ROWS, min(width, WIDEST), device=device)
    layer = nn.Linear(rows.shape[1], 3 * rows.shape[1], bias=False, device=device)

    def product() -> Tensor:
        layer.weight.grad = None
        with autocast(precision, device):
            outputs = layer(rows)
        outputs.backward(outputs.detach())
        return outputs

    flops = 4 * rows.numel() * layer.out_features / _seconds(product, device, clock)
    numbers = torch.zeros(STREAMED, device=device)
    bandwidth = 3 * numbers.nbytes / _seconds(lambda: numbers * numbers, device, clock)
    functions = 2 * numbers.nbytes / _seconds(numbers.exp, device, clock)
    small = nn.Parameter(torch.zeros(16, device=device))

    def many() -> Tensor:
        each: Tensor = small
        for _ in range(CALLS):
            each = each + small
        return each

    call = _seconds(many, device, clock) / CALLS
    return Speed(REACHED * flops, REACHED * bandwidth, REACHED * functions, call / REACHED, "measured on this machine")


def _seconds(run: Callable[[], object], device: torch.device, clock: Callable[[], float]) -> float:
    """The median of a few runs after one that allocates memory."""
    times = []
    for _ in range(REPEATS + 1):
        started = clock()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(clock() - started)
    return median(times[1:])
