"""Describes the machine and the package versions, without anything that identifies the individual machine."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from kedge_base.version import __version__

PACKAGES = ("torch", "transformers")
PEER_PACKAGES = ("trl", "torch", "transformers", "accelerate")
CPU_INFO = Path("/proc/cpuinfo")
MEMORY_INFO = Path("/proc/meminfo")
BF16_FLAGS = {"avx512_bf16", "amx_bf16"}


def available_cores() -> int:
    """Number of cores this process may use."""
    return len(os.sched_getaffinity(0))


def describe_machine(num_threads: int) -> dict[str, str]:
    """Processor, memory, threads, system."""
    cpu, memory = (_fields(path) for path in (CPU_INFO, MEMORY_INFO))
    native = BF16_FLAGS & set(cpu["flags"].split()) if "flags" in cpu else set()
    return {
        "processor": cpu.get("model name", platform.machine()),
        "bf16 in hardware": ", ".join(sorted(native)) or "no",
        "threads": str(num_threads),
        "memory": f"{int(memory['MemTotal'].split()[0]) / 2**20:.0f} GiB",
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
    }


def describe_versions(peer: Path | None) -> dict[str, str]:
    """Package versions of both environments; of kedge's alone without a peer."""
    own = {"kedge's": _listed([f"kedge {__version__}", *(f"{name} {version(name)}" for name in PACKAGES)])}
    if peer is None:
        return own
    code = f"from importlib.metadata import version\nfor name in {PEER_PACKAGES}: print(name, version(name))"
    printed = subprocess.run([str(peer), "-c", code], capture_output=True, text=True, check=True).stdout
    return {**own, "TRL's": _listed(printed.splitlines())}


def _listed(words: Sequence[str]) -> str:
    return ", ".join(words)


def _fields(path: Path) -> dict[str, str]:
    """The `name: value` lines of a /proc file; the first of each name."""
    fields: dict[str, str] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    return fields
