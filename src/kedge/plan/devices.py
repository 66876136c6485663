"""Devices that a stage can be planned for, by name: `h100`, `a100-40`, `4090`, `m3-64`, `cpu:24GiB`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from kedge.errors import ConfigError
from kedge.plan.machine import Speed

__all__ = ["DEVICES", "Device", "find_device"]

UNITS: Final = {"GIB": 2**30, "GB": 10**9, "MIB": 2**20, "MB": 10**6, "TIB": 2**40, "TB": 10**12}
PRODUCTS, STREAMS, LAUNCH = 0.35, 0.7, 8e-6
"""Shares of a data sheet's FLOP/s and bandwidth that passes reach, and seconds to launch an operation.

The first is fitted to published updates on H100: docs/scaling.md.
"""

USABLE = 0.98
"""Share of a card's memory that a program can have; makers count in units of 2³⁰."""


@dataclass(frozen=True)
class Device:
    """What a stage runs on.

    Attributes:
        name: As in a report.
        memory: Bytes that the run can have; None where that is unknown.
        accelerator: Whether it is one: bf16 products, and attention in bf16.
        speed: None for this machine's, which is measured.
        is_this: Whether it is this machine, with its own limit.
        shares_memory: Whether an accelerator's memory is the processor's, too, so that nothing is moved between them.
        bound: What limits the memory.
    """

    name: str
    memory: float | None
    accelerator: bool
    speed: Speed | None = None
    is_this: bool = False
    shares_memory: bool = False
    bound: str = ""


def _card(name: str, memory: float, flops: float, bandwidth: float, source: str) -> Device:
    speed = Speed(flops * PRODUCTS, bandwidth * STREAMS, bandwidth * STREAMS, LAUNCH, f"its data sheet ({source})")
    return Device(name, memory * USABLE, accelerator=True, speed=speed, bound=f"the memory of {name}")


_H100: Final = "https://www.nvidia.com/en-us/data-center/h100/"
_H200: Final = "https://www.nvidia.com/en-us/data-center/h200/"
_A100: Final = "https://www.nvidia.com/en-us/data-center/a100/"
_4090: Final = "https://www.nvidia.com/en-us/geforce/graphics-cards/40-series/rtx-4090/"
_M3: Final = "https://support.apple.com/en-us/117737"

DEVICES: Final[Mapping[str, Device]] = MappingProxyType(
    {
        "h100": _card("H100", 80 * 2**30, 989e12, 3.35e12, _H100),
        "h200": _card("H200", 141 * 2**30, 989e12, 4.8e12, _H200),
        "a100": _card("A100", 80 * 2**30, 312e12, 2.0e12, _A100),
        "a100-40": _card("A100 40 GB", 40 * 2**30, 312e12, 1.555e12, _A100),
        "4090": _card("RTX 4090", 24 * 2**30, 165e12, 1.008e12, _4090),
        # Memory that the processor shares; 14.2 TFLOP/s in fp32 and 400 GB/s.
        "m3-64": replace(_card("M3 Max 64 GB", 64 * 2**30, 14.2e12, 0.4e12, _M3), shares_memory=True),
    }
)


def find_device(name: str) -> Device:
    """The device with this name, or one of a memory: `cpu:24GiB` is this machine's processor, `gpu:80GiB` any GPU.

    Raises:
        ConfigError: There is none.
    """
    if (found := DEVICES.get(name.lower())) is not None:
        return found
    size = re.fullmatch(r"(cpu|gpu):(\d+(?:\.\d+)?) ?([MGT]i?B)", name, re.IGNORECASE)
    if size and float(size[2]) > 0:
        memory, kind = float(size[2]) * UNITS[size[3].upper()], size[1].upper()
        return Device(f"a {kind} with {size[2]} {size[3]}", memory, accelerator=kind == "GPU", bound="--device")
    raise ConfigError(f"--device {name!r} is unknown; name one of {', '.join(DEVICES)}, gpu:80GiB, cpu:24GiB")
