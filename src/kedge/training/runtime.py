"""The run's environment: device, threads, random streams, memory, time."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import torch

from kedge_base.errors import ConfigError
from kedge_base.machine.memory import note_exhaustion

GIB = 2**30
# malloc.h
M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4
KERNEL_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Environment variables of the two caches, read at the first product."""
KEPT_KERNELS = 32
"""Capacity of each cache in kernels, enough for the shapes of a training pass and of sampling with its few rows. A
kernel takes a millisecond."""
CGROUP_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
PHASES = {"rollout": "sampling", "reward": "scoring", "train": "the update"}
"""Display names of phases that are named differently in the code."""


def resolve_device(name: str = "auto", local_rank: int | None = None) -> torch.device:
    """The device to train on.

    Args:
        name: "auto" (CUDA if available, else the CPU), or a torch device name: "cpu", "cuda", "cuda:1", "mps".
        local_rank: Number of this process on its machine; it gets the GPU of this number. None for a single process.

    Raises:
        ConfigError: The name is unknown, or this machine has no such device.
    """
    own = "cuda" if local_rank is None else f"cuda:{local_rank}"
    if name == "auto":
        return torch.device(own if torch.cuda.is_available() else "cpu")
    name = own if name == "cuda" else name
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device: {name!r} is unknown; expected 'auto', 'cpu', 'cuda', 'cuda:0' or 'mps'") from error
    counts = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    count = counts.get(device.type, 0)
    if (device.index or 0) >= count:
        raise ConfigError(
            f"device: {name!r} is not available ({count} {device.type} devices found); try 'auto' or 'cpu'"
        )
    return device


def available_cores() -> int:
    """Number of cores this process may use: its CPU affinity, limited by a container's quota."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    if CGROUP_CPU_QUOTA.is_file():
        quota, period = CGROUP_CPU_QUOTA.read_text(encoding="ascii").split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def set_threads(num_threads: int | None = None) -> int:
    """Set torch's number of threads, capped at the available cores; return the number in use.

    With more threads than cores, threads wait for each other in every operation, and a run is several times slower.

    Args:
        num_threads: ≥ 1, or None for torch's default (which honors `OMP_NUM_THREADS`).
    """
    cores = available_cores()
    if num_threads is not None and num_threads > cores:
        warnings.warn(f"num_threads: {num_threads} exceeds the {cores} available cores; using {cores}", stacklevel=2)
    torch.set_num_threads(min(num_threads or torch.get_num_threads(), cores))
    return torch.get_num_threads()


def crowded_line(threads: int) -> str:
    """Return a one-line warning if threads have to share their cores with other processes, else an empty text.

    Measured for a tenth of a second, in which this process does nothing.
    """
    cores = psutil.cpu_count() or 1
    others = psutil.cpu_percent(0.1) / 100 * cores if threads > 1 else 0.0
    if others + threads <= cores + 0.5:
        return ""
    return (
        f"other processes keep {others:.1f} of {cores} cores busy, and the run's {threads} threads wait for each other "
        "in every operation, which can take ten times as long: runtime.num_threads=1 (OMP_NUM_THREADS=1) avoids it, or "
        "OMP_WAIT_POLICY=passive in the environment of all of them"
    )


def tune_memory() -> None:
    """Keep freed memory for reuse, and the number of kernels small. Must be called before the first matrix product.

    A training pass frees and allocates the same large blocks repeatedly; each new block costs a page fault per 4 KiB,
    in total a tenth to a third of a pass on a CPU. So glibc is told not to return memory to the system.

    oneDNN and its caller in torch make a kernel for each new shape of a bf16 product, half a MiB with its buffers, and
    keep 1,024 each. Packed rows have a new number of tokens in every pass, so a process would grow by a GiB and more.
    """
    for cache in KERNEL_CACHES:
        os.environ.setdefault(cache, str(KEPT_KERNELS))
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(M_MMAP_MAX, 0)
    mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def avoid_kernels_per_shape(device: torch.device) -> None:
    """Keep torch from cuDNN's attention, which it prefers on an H100.

    It plans for half a second for every new batch shape, which means for each sampled token.
    """
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


_changing_dtype = threading.Lock()
_callers_dtypes: list[torch.dtype] = []


@contextmanager
def default_modes() -> Iterator[None]:
    """Within this context, torch has the modes of a new process: gradients, float32, no autocast, tensors on the CPU.

    Modes that the caller has set, such as `torch.no_grad()`, do not affect a run; they are restored afterwards.
    """
    with ExitStack() as modes:
        modes.enter_context(torch.inference_mode(False))
        modes.enter_context(torch.enable_grad())
        for kind in ("cpu", "cuda", "mps"):
            if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
                modes.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device().type != "cpu":
            modes.enter_context(torch.device("cpu"))
        modes.enter_context(_float32())
        yield


@contextmanager
def _float32() -> Iterator[None]:
    """Set the default dtype of all threads; the caller's is restored when the last of several runs ends."""
    with _changing_dtype:
        _callers_dtypes.append(_callers_dtypes[0] if _callers_dtypes else torch.get_default_dtype())
        torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        with _changing_dtype:
            dtype = _callers_dtypes.pop()
            if not _callers_dtypes:
                torch.set_default_dtype(dtype)


def stream_seed(seed: int, *names: str | int) -> int:
    """Return the seed of a named random stream of a run, in [0, 2⁶³).

    Streams are independent, so an extra draw in one place (an evaluation, a longer response) changes nothing elsewhere.
    They are equal in every process: `stream_seed(0, "rollout", update, row)` does not depend on what ran before.

    Args:
        seed: The run's seed.
        names: The stream's name: words and counters, in order.
    """
    digest = hashlib.blake2b(repr((seed, *names)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def stream_seeds(seed: int, *names: str | int, count: int) -> list[int]:
    """Return the seeds of the streams with these names and a number from 0 to `count` − 1; see `stream_seed`."""
    return [stream_seed(seed, *names, number) for number in range(count)]


def stream(seed: int, *names: str | int, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator for a named random stream; see `stream_seed`."""
    return torch.Generator(device).manual_seed(stream_seed(seed, *names))


def use_deterministic_kernels() -> None:
    """Use deterministic CUDA kernels, at some cost in speed.

    Not needed on a CPU, where the same seed and number of threads give the same bits. Call it before the device's first
    operation. An operation without a deterministic kernel warns instead of failing.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True, warn_only=True)


def memory_in_use(device: torch.device) -> dict[str, float]:
    """`memory/process`: resident memory of the process; `memory/device`: peak memory of a GPU's tensors; GiB."""
    memory = {"memory/process": psutil.Process().memory_info().rss / GIB}
    if device.type == "cuda":
        memory["memory/device"] = torch.cuda.max_memory_allocated(device) / GIB
    return memory


class Stopwatch:
    """Seconds by phase of one update, measured from construction to `metrics`.

    Args:
        device: The device that does the work; a GPU is synchronized at the end of each phase so that its time counts in
            that phase.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._started = time.perf_counter()
        self._phases: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time spent inside to `time/<name>`."""
        started = time.perf_counter()
        try:
            yield
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        except Exception as error:
            note_exhaustion(error, PHASES.get(name, name))
            raise
        self._phases[name] = self._phases.get(name, 0.0) + time.perf_counter() - started

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time spent inside."""
        started = time.perf_counter()
        yield
        self._started += time.perf_counter() - started

    def metrics(self, *, num_tokens: int) -> dict[str, float]:
        """`time/<phase>` and `time/update` in seconds, and `tokens_per_second` of the whole update.

        Args:
            num_tokens: Tokens of prompts and responses in the update, without padding.
        """
        total = time.perf_counter() - self._started
        phases = {f"time/{name}": seconds for name, seconds in self._phases.items()}
        return {**phases, "time/update": total, "tokens_per_second": num_tokens / total}
