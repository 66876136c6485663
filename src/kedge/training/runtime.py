"""The run's environment: device, threads, random streams, memory, time, and the signals that stop it early."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType
from typing import Any

import psutil
import torch

from kedge.ranks import ALONE, Ranks
from kedge_base.errors import ConfigError, RunEnded
from kedge_base.machine.control_groups import available_cores
from kedge_base.machine.invocation import is_command_line
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
PHASES = {"rollout": "sampling", "reward": "scoring", "train": "the update"}
"""Display names of phases that are named differently in the code."""
GRACE_SECONDS = 20.0
"""Time in which the current update must stop or finish after a signal, before it is cut short."""

RANKS_GRACE_SECONDS = 8.0
"""Grace period with several ranks, which launchers kill after 30 seconds, including the time for saving."""

ANNOUNCEMENTS = () if sys.platform == "win32" else (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals for a lost connection, and those that clusters send before the end, such as Slurm's `--signal=USR1@60`."""


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
        # An autocast context keeps its copies of weights until the outermost one ends: the run's must be outermost.
        while torch.autocast_decrement_nesting() >= 0:
            modes.callback(torch.autocast_increment_nesting)
        torch.autocast_increment_nesting()
        torch.clear_autocast_cache()
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


def stream(seed: int, *names: str | int) -> torch.Generator:
    """A generator for a named random stream; see `stream_seed`."""
    return torch.Generator().manual_seed(stream_seed(seed, *names))


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


class Terminated(RunEnded):
    """A signal other than Ctrl-C stopped the run; uncaught, it exits the interpreter with 128 + its number."""

    def __init__(self, signum: int = signal.SIGTERM) -> None:
        super().__init__(128 + signum)


class Stopping:
    """A requested stop and its signal; all ranks stop in the same place.

    Args:
        ranks: The ranks that stop together.

    Attributes:
        ranks: The ranks that stop together.
        was_agreed: All ranks stop in the same place.
        was_raised: The block has been stopped, and is saving what it has.
        at_once: A single process stops wherever it is, since the block has changed nothing yet.
    """

    def __init__(self, ranks: Ranks = ALONE) -> None:
        self.ranks = ranks
        self._signal: int | None = None
        self._is_saving = False
        self._program: Any = None
        self.was_agreed = False
        self.was_raised = False
        self.at_once = False

    @property
    def requested(self) -> bool:
        """True if a signal has arrived: finish the current step and save."""
        return self._signal is not None

    def request(self, signum: int) -> None:
        """Record the first signal as a request, and stop here if the block allows it.

        A second signal ends a command immediately. In a Python program that continues, such as a notebook, the block
        stops here, unless it is saving. With several ranks a second signal has no effect: each rank gets both the
        terminal's and the launcher's.

        Raises:
            KeyboardInterrupt, Terminated: See `raise_if_requested`.
        """
        is_second = self.requested
        self._signal = self._signal or signum
        if self.ranks.are_several:
            return
        if is_second and is_command_line():
            _exit_at_once(signum)
        if (is_second or self.at_once) and not self._is_saving:
            self._raise_for(self._signal)

    def raise_if_requested(self) -> None:
        """Stop the run here if it was requested of any rank; all ranks call this in the same places.

        Raises:
            KeyboardInterrupt: The signal was Ctrl-C.
            Terminated: It was a different signal.
        """
        signum = self.ranks.largest(self._signal or 0)
        self.was_agreed = bool(signum)
        self._raise_for(signum)

    def forget(self) -> None:
        """Clear the request once it has been handled."""
        self._signal = None
        self.was_raised = self.at_once = False

    def start_grace(self, seconds: float) -> None:
        """Stop this rank after some seconds wherever it is; if it is saving then, extend the grace period instead.

        Until `end_grace`, it replaces the program's own timer, such as one that limits the current call.
        """
        if sys.platform == "win32":  # without such a timer, updates are never interrupted
            return

        self._grace = seconds
        before = signal.signal(signal.SIGALRM, self._on_timer), signal.setitimer(signal.ITIMER_REAL, seconds)
        self._program = self._program or before

    def _on_timer(self, _signum: int, _frame: FrameType | None) -> None:
        if self._is_saving:
            self.start_grace(self._grace)
        else:
            self._raise_for(self._signal or 0)

    def end_grace(self) -> None:
        """Let the program's own timer continue."""
        if sys.platform == "win32" or self._program is None:
            return
        handler, timer = self._program
        self._program = None
        if signal.getsignal(signal.SIGALRM) != self._on_timer:
            return  # the program's timed call has ended and restored another handler
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Within this context, the end of the grace period does not interrupt."""
        self._is_saving = True
        try:
            yield
        finally:
            self._is_saving = False

    def _raise_for(self, signum: int) -> None:
        if not signum:
            return
        self.was_raised = True
        self.end_grace()  # no time limit while saving
        raise KeyboardInterrupt if signum == signal.SIGINT else Terminated(signum)


@contextmanager
def stopping(grace_seconds: float | None = None, ranks: Ranks = ALONE, *, at_once: bool = False) -> Iterator[Stopping]:
    """Within this context, signals are requests; the block checks for them where it can stop.

    These are Ctrl-C, SIGTERM and, unless the program handles or ignores them, `ANNOUNCEMENTS`.

    In a block that has not checked within the grace period, the exception of `raise_if_requested` is raised wherever it
    is; once, and not while it is saving. Outside the main thread Python delivers no signals, and this context does
    nothing.

    Args:
        grace_seconds: Seconds from the signal to the interruption; None for the usual time.
        ranks: The ranks that stop together.
        at_once: Stop a single process wherever it is, since the block has changed nothing yet.
    """
    stop = Stopping(ranks)
    stop.at_once = at_once
    with listening(stop, grace_seconds):
        yield stop


@contextmanager
def listening(stop: Stopping, grace_seconds: float | None = None) -> Iterator[None]:
    """Within this context, signals are requests; see `stopping`."""
    ranks = stop.ranks
    grace = grace_seconds or (RANKS_GRACE_SECONDS if ranks.are_several else GRACE_SECONDS)
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_signal(signum: int, _frame: FrameType | None) -> None:
        stop.request(signum)
        if not stop.was_raised:
            stop.start_grace(grace)

    free = [signum for signum in ANNOUNCEMENTS if signal.getsignal(signum) == signal.SIG_DFL]  # nohup ignores SIGHUP
    before = {signum: signal.signal(signum, on_signal) for signum in (signal.SIGINT, signal.SIGTERM, *free)}
    try:
        yield
    finally:
        stop.end_grace()
        # A failing rank still has to save the run; its launcher's signal would cut that short.
        is_failing = ranks.are_several and sys.exc_info()[0] is not None
        for signum, handler in before.items():
            signal.signal(signum, signal.SIG_IGN if is_failing and signum == signal.SIGTERM else handler)


def _exit_at_once(signum: int) -> None:
    """Exit without cleanup, which could take time; files are written under temporary names, so none is damaged."""
    with suppress(OSError):  # the terminal is gone
        if os.isatty(2):
            os.write(2, b"\x1b[?25h\n")  # show the cursor, which the progress display hides
    os._exit(128 + signum)
