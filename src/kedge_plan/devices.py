"""The devices to plan for: this machine or a named one, with memory and speed."""

from __future__ import annotations

import re
import time
import timeit
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import inf
from statistics import median

import torch
from torch import Tensor, nn

from kedge.models import Precision, autocast
from kedge.training.runtime import resolve_device, tune_memory
from kedge_base.errors import ConfigError
from kedge_base.machine.memory import MemoryLimit, held_memory, memory_limits

UNITS = {"GIB": 2**30, "GB": 10**9, "MIB": 2**20, "MB": 10**6, "TIB": 2**40, "TB": 10**12}
PRODUCTS = 0.35
STREAMS = 0.7
LAUNCH = 12e-6
"""Shares of the specified FLOP/s and bandwidth that passes reach, and seconds to launch an operation.

The first is fitted to published updates on H100s: docs/ranks.md. The last is measured on an H100: a model of
SmolLM2-135M's shape samples a token in 24 ms.
"""

USABLE = 0.98
"""Share of a card's memory that a program can use; vendors count in GiB."""
ROWS = 512
WIDEST = 4096
STREAMED = 2**20
"""Rows and largest width of the measured product, and size of the measured stream: 4 MB, typical of activations."""
CALLS = 500
REPEATS = 5
REACHED = 0.70
"""Share of the measured speed that updates reach; Python, metrics and logs take the rest. Median of `bench.plan`."""


@dataclass(frozen=True)
class Speed:
    """A machine's speed.

    Attributes:
        flops: Speed of matrix products in the run's precision, FLOP/s.
        bandwidth: Memory bandwidth, which limits all other operations, byte/s.
        functions: Lower bandwidth of elementwise functions such as exp, byte/s.
        call: Overhead per operation, seconds.
        origin: Source of the figures.
    """

    flops: float
    bandwidth: float
    functions: float
    call: float
    origin: str

    def seconds(self, work: Mapping[str, float]) -> float:
        """Estimate the seconds that some `LiveBytes.work` takes."""
        products = work["flops"] / self.flops
        others = work["bytes"] / self.bandwidth + work["functions"] / self.functions
        return products + others + work["calls"] * self.call


@dataclass(frozen=True)
class Device:
    """The device and processes that a stage runs on.

    Attributes:
        name: Its name in reports.
        memory: Bytes available to the run; None if unknown.
        accelerator: True for an accelerator, where products and attention are in bf16.
        speed: Its speed; None for this machine, whose speed is measured.
        is_this: True for this machine, with its own limit.
        shares_memory: True if accelerator and processor share memory, so that nothing moves between them.
        bound: The name of the limit on the memory.
        free: Bytes of the memory that are free now; None if unknown.
    """

    name: str
    memory: float | None
    accelerator: bool
    speed: Speed | None = None
    is_this: bool = False
    shares_memory: bool = False
    bound: str = ""
    free: float | None = None

    @property
    def room(self) -> float:
        """Bytes that a run can have now."""
        return min(each for each in (self.memory, self.free, inf) if each is not None)

    @property
    def has_own_memory(self) -> bool:
        """True for a GPU with its own memory, from which data can be offloaded to the host."""
        return self.accelerator and not self.shares_memory


def _card(name: str, gib: float, flops: float, bandwidth: float, source: str) -> Device:
    speed = Speed(flops * PRODUCTS, bandwidth * STREAMS, bandwidth * STREAMS, LAUNCH, f"its data sheet ({source})")
    return Device(name, gib * 2**30 * USABLE, accelerator=True, speed=speed, bound=f"the memory of {name}")


NVIDIA = "https://www.nvidia.com/en-us"
DEVICES = {
    "h100": _card("H100", 80, 989e12, 3.35e12, f"{NVIDIA}/data-center/h100/"),
    "h200": _card("H200", 141, 989e12, 4.8e12, f"{NVIDIA}/data-center/h200/"),
    "a100": _card("A100", 80, 312e12, 2.0e12, f"{NVIDIA}/data-center/a100/"),
    "a100-40": _card("A100 40 GB", 40, 312e12, 1.555e12, f"{NVIDIA}/data-center/a100/"),
    "4090": _card("RTX 4090", 24, 165e12, 1.008e12, f"{NVIDIA}/geforce/graphics-cards/40-series/rtx-4090/"),
    # Unified memory; 14.2 TFLOP/s in fp32 and 400 GB/s.
    "m3-64": replace(
        _card("M3 Max 64 GB", 64, 14.2e12, 0.4e12, "https://support.apple.com/en-us/117737"), shares_memory=True
    ),
}


def find_device(name: str) -> Device:
    """Find a device by name, or by memory: `cpu:24GiB` is this machine's processor, `gpu:80GiB` any GPU.

    Raises:
        ConfigError: It is not available.
    """
    if (found := DEVICES.get(name.lower())) is not None:
        return found
    size = re.fullmatch(r"(cpu|gpu):(\d+(?:\.\d+)?) ?([MGT]i?B)", name, re.IGNORECASE)
    if size and float(size[2]) > 0:
        memory = float(size[2]) * UNITS[size[3].upper()]
        kind = size[1].upper()
        return Device(f"a {kind} with {size[2]} {size[3]}", memory, accelerator=kind == "GPU", bound="--device")
    raise ConfigError(f"--device {name!r} is unknown; name one of {', '.join(DEVICES)}, gpu:80GiB, cpu:24GiB")


def this_machine(device_name: str = "auto") -> Device:
    """The device of a run on this machine, with the memory available to the run and how much of it is free now."""
    device = resolve_device(device_name)
    if device.type == "cuda":
        free, memory = map(float, torch.cuda.mem_get_info(device))
        name = torch.cuda.get_device_name(device)
        return Device(name, memory, accelerator=True, is_this=True, bound=f"the memory of {name}", free=free)
    limits = memory_limits()
    found = min(((_room(each), each.name) for each in limits), default=None)
    free = min((each.free + held_memory() for each in limits), default=None)
    kind = "CPU" if device.type == "cpu" else device.type
    memory, bound = (None, "") if found is None else found
    is_accelerator = device.type != "cpu"
    return Device(f"this machine's {kind}", memory, is_accelerator, None, True, is_accelerator, bound, free)


def _room(limit: MemoryLimit) -> float:
    """Memory that this process could use under a limit; `ulimit` also counts memory that is only mapped."""
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
        device: The device to measure.
        precision: Number format of the products.
        width: The model's hidden size: products of small matrices are slower.
        clock: A clock, in seconds.
    """
    tune_memory()  # as a run does, since touching a new page costs more than computing on it
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
    """Median time of a few runs, after a first one that allocates memory."""

    def whole() -> None:
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return median(timeit.repeat(whole, timer=clock, number=1, repeat=REPEATS + 1)[1:])
