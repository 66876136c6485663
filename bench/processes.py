"""Runs a child process and measures when each row of its metrics appears, and its peak memory."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

GIB = 2**30
TICK = 0.005
"""Polling interval in seconds: short compared with an update, and negligible load."""


class BenchError(Exception):
    """An error of the benchmark, printed on one line."""


@dataclass(frozen=True)
class Finished:
    """Measurements of a child process.

    Attributes:
        arrivals: Seconds from its start to each row of its metrics.
        peak_memory: Peak resident memory, GiB; with `gpu`, the most memory of the first GPU that was seen in use.
    """

    arrivals: tuple[float, ...]
    peak_memory: float


def environment(num_threads: int) -> dict[str, str]:
    """This process's environment with a fixed number of threads, no network and no notices."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "MKL_", "KMP_"))}
    return {
        **kept,
        "OMP_NUM_THREADS": str(num_threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }


def fresh(folder: Path) -> bool:
    """False if a folder's run has ended; else what there is of it is removed."""
    if (folder / "finished.json").is_file():
        return False
    shutil.rmtree(folder, ignore_errors=True)
    return True


def run_alone(
    command: Sequence[str], *, log: Path, rows: Path | None = None, num_threads: int, gpu: bool = False
) -> Finished:
    """Run a command to its end.

    Args:
        command: The program and its arguments.
        log: Gets what it prints.
        rows: The file to which it adds a line per update, or None.
        num_threads: CPU threads it may use.
        gpu: Measure GPU memory.

    Raises:
        BenchError: It failed; the error ends with its last line of output.
    """
    with log.open("wb") as printed:
        started = time.perf_counter()
        child = subprocess.Popen(command, stdout=printed, stderr=subprocess.STDOUT, env=environment(num_threads))
        try:
            finished = _watch(child, rows, started, gpu)
        finally:
            if child.returncode is None:
                child.kill()
                child.wait()
    if child.returncode:
        last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        raise BenchError(f"{' '.join(command)}: exit code {child.returncode}, {' '.join(last) or 'no output'}")
    return finished


def _watch(child: subprocess.Popen[bytes], rows: Path | None, started: float, gpu: bool) -> Finished:
    """Record the rows as they appear, until the child ends; `wait4` gives the memory of this child only."""
    arrivals: list[float] = []
    with _gpu_memory() if gpu else nullcontext() as gpu_memory:
        while True:
            ended, status, usage = os.wait4(child.pid, os.WNOHANG)
            elapsed = time.perf_counter() - started
            arrivals += [elapsed] * (_count_lines(rows) - len(arrivals))
            if ended:
                child.returncode = os.waitstatus_to_exitcode(status)
                peak = usage.ru_maxrss * 1024 / GIB if gpu_memory is None else gpu_memory()
                return Finished(tuple(arrivals), peak)
            time.sleep(TICK)


def _count_lines(path: Path | None) -> int:
    return path.read_bytes().count(b"\n") if path is not None and path.is_file() else 0


@contextmanager
def _gpu_memory() -> Iterator[Callable[[], float]]:
    """Ask ten times a second, since a system may empty its cache before an update ends; gives the most so far, GiB."""
    program = shutil.which("nvidia-smi") or "nvidia-smi"
    query = [program, "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0", "--loop-ms=100"]
    with tempfile.TemporaryFile("w+") as seen, subprocess.Popen(query, stdout=seen) as asking:

        def most() -> float:
            seen.seek(0)
            return max(map(float, seen.read().split()), default=math.nan) / 1024

        try:
            yield most
        finally:
            asking.kill()
