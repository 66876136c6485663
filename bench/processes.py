"""Runs a child process and measures when each row of its metrics appears, and its peak memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["BenchError", "Finished", "environment", "run_alone"]

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
        peak_memory: Peak resident memory, GiB; with `gpu`, the most GPU memory in use after a row.
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
    gpu_memory = 0.0
    while True:
        ended, status, usage = os.wait4(child.pid, os.WNOHANG)
        elapsed = time.perf_counter() - started
        count = _count_lines(rows)
        if gpu and count > len(arrivals):
            gpu_memory = max(gpu_memory, _gpu_memory())
        arrivals += [elapsed] * (count - len(arrivals))
        if ended:
            child.returncode = os.waitstatus_to_exitcode(status)
            return Finished(tuple(arrivals), gpu_memory if gpu else usage.ru_maxrss * 1024 / GIB)
        time.sleep(TICK)


def _count_lines(path: Path | None) -> int:
    return path.read_bytes().count(b"\n") if path is not None and path.is_file() else 0


def _gpu_memory() -> float:
    """GiB in use on the first GPU; a caching allocator returns nothing, so after an update this is the peak."""
    program = shutil.which("nvidia-smi") or "nvidia-smi"
    query = [program, "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return float(subprocess.run(query, capture_output=True, text=True, check=True).stdout) / 1024
