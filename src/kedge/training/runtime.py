"""What a run stands on: device, threads, random streams, memory."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import random
import sys
import warnings
from pathlib import Path

import numpy as np
import psutil
import torch

from kedge.errors import ConfigError

GIB = 2**30
# From malloc.h.
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
CGROUP_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def resolve_device(name: str = "auto") -> torch.device:
    """The device to train on.

    Args:
        name: "auto" (a CUDA device where there is one, else the CPU), or torch's name: "cpu", "cuda", "cuda:1", "mps".

    Raises:
        ConfigError: The name is unknown, or this machine has no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device: {name!r} is unknown; expected 'auto', 'cpu', 'cuda', 'cuda:0' or 'mps'") from error
    counts = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    count = counts.get(device.type, 0)
    if (device.index or 0) >= count:
        raise ConfigError(f"device: {name!r} is not there ({count} {device.type} devices found); try 'auto' or 'cpu'")
    return device


def available_cores() -> int:
    """How many cores this process may keep busy: its CPU affinity, and a container's quota."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    if CGROUP_CPU_QUOTA.is_file():
        quota, period = CGROUP_CPU_QUOTA.read_text(encoding="ascii").split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def set_threads(num_threads: int | None = None) -> int:
    """Let torch use this many threads, never more than there are cores to run them; return the number in use.

    More busy threads than cores wait for each other in every operation, which slows a run down manifold.

    Args:
        num_threads: ≥ 1, or None for what torch would take by itself (which honours `OMP_NUM_THREADS`).
    """
    cores = available_cores()
    if num_threads is not None and num_threads > cores:
        warnings.warn(
            f"num_threads: {num_threads} is more than the {cores} cores available; using {cores}", stacklevel=2
        )
    torch.set_num_threads(min(num_threads or torch.get_num_threads(), cores))
    return torch.get_num_threads()


def keep_freed_memory() -> None:
    """Let the C library keep the memory that tensors free, instead of giving it back and fetching it anew each time.

    A training pass frees and wants the same large blocks over and over; each fetched one costs a page fault per 4 KiB.
    With glibc that is a tenth to a third of the time of a pass on a processor. Elsewhere nothing is done.
    """
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(M_MMAP_MAX, 0)
    mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def seed_everything(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch, on all devices."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def stream_seed(seed: int, *names: str | int) -> int:
    """The seed of one named random stream of a run, in [0, 2⁶³).

    Streams are independent, so that one more draw in one place (an evaluation, a longer answer) moves nothing in the
    others, and the same in every process: `stream_seed(0, "rollout", update, row)` does not depend on what ran before.

    Args:
        seed: The run's seed.
        names: What the stream is for: words and counters, the order matters.
    """
    digest = hashlib.blake2b(repr((seed, *names)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def stream(seed: int, *names: str | int, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator for one named random stream; see `stream_seed`."""
    return torch.Generator(device).manual_seed(stream_seed(seed, *names))


def use_deterministic_kernels() -> None:
    """Make CUDA choose the same kernels in every run, at some cost in speed.

    On a CPU with the same number of threads nothing needs to be done: the same seed gives the same bits. Call it before
    the first operation on the device. An operation that has no deterministic kernel warns instead of failing.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True, warn_only=True)


def memory_in_use(device: torch.device) -> dict[str, float]:
    """`memory/process`: what the process holds now; `memory/device`: the most that a GPU's tensors have held; GiB."""
    held = {"memory/process": psutil.Process().memory_info().rss / GIB}
    if device.type == "cuda":
        held["memory/device"] = torch.cuda.max_memory_allocated(device) / GIB
    return held
