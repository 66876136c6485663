"""Leak test: thousands of PPO updates of a tiny policy in one process.

    python -m bench.soak FOLDER [--updates 2000]

Everything that could leak is included: checkpoints, samples, and an isolated reward function that prints, crashes now
and then, and is restarted. The figures go to `FOLDER/soak.json`; a table of them is printed.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

import torch

from bench.recipe import PROMPTS_FILE, Workload
from bench.systems import LEARNING_RATE
from bench.tables import Table
from bench.workload import make_workload
from kedge.config import Config, config_from_settings
from kedge.stages.ppo import run_ppo

FIGURES_FILE = "soak.json"
WORKLOAD = Workload(
    size="XS", hazard=6.0, max_response=8, min_prompt=4, max_prompt=8, context_length=32, num_prompts=32
)
SAVE_INTERVAL = 20
WINDOW = 100
"""Updates on either side of an update over which its time is averaged (median)."""
REWARD = """
import os

LIFETIME = {lifetime}
calls = 0

def crashes_sometimes(completions):
    global calls
    calls += 1
    if calls == LIFETIME:
        os._exit(1)
    print("call", calls)
    return [float(len(text)) for text in completions]
"""


@dataclass(frozen=True)
class Reading:
    """Resources of the process after an update.

    Attributes:
        update: Number of the update, from 1.
        memory: Resident memory, MiB, after returning free memory, which could hide a leak.
        objects: Objects tracked by Python's garbage collector after a collection.
        files: Open files, pipes and sockets.
        threads: Threads.
        children: Living child processes.
    """

    update: int
    memory: float
    objects: int
    files: int
    threads: int
    children: int


@dataclass
class Soak:
    """Measurements of a run.

    Attributes:
        interval: Updates between readings.
        readings: One per interval.
        seconds: Time of each update, without the time of readings.
    """

    interval: int
    readings: list[Reading] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._ended = time.perf_counter()

    def watch(self, update: int, _roles: object) -> None:
        """Measure this process after an update."""
        self.seconds.append(time.perf_counter() - self._ended)
        if update % self.interval == 0:
            self.readings.append(read_process(update))
        self._ended = time.perf_counter()

    def at(self, update: int) -> Reading:
        """The reading after an update."""
        return self.readings[update // self.interval - 1]

    def seconds_at(self, update: int) -> float:
        """Median time of the updates around one."""
        return median(self.seconds[max(0, update - WINDOW) : update + WINDOW])


def read_process(update: int) -> Reading:
    """Read this process's resources from /proc."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    own = Path("/proc/self")
    fields = dict(line.split(":", 1) for line in (own / "status").read_text().splitlines())
    children = [pid for listed in own.glob("task/*/children") for pid in listed.read_text().split()]
    # Listing the folder opens it as well.
    files = len(list((own / "fd").iterdir())) - 1
    memory = int(fields["VmRSS"].split()[0]) / 1024
    threads = int(fields["Threads"])
    return Reading(update, memory, len(gc.get_objects()), files, threads, len(children))


def soak(folder: Path, *, num_updates: int, interval: int) -> Soak:
    """Run PPO in this process and save the measurements in the folder.

    Args:
        folder: A new or empty folder.
        num_updates: Updates of the run.
        interval: Updates between readings.
    """
    make_workload(WORKLOAD, folder)
    (folder / "reward.py").write_text(REWARD.format(lifetime=max(25, num_updates // 20)), encoding="utf-8")
    seen = Soak(interval)
    run_ppo(_configure(folder, num_updates), on_update=seen.watch)
    (folder / FIGURES_FILE).write_text(json.dumps(asdict(seen)), encoding="utf-8")
    return seen


def _configure(folder: Path, num_updates: int) -> Config:
    settings = {
        "model": str(folder / "policy"),
        "data.prompts": [str(folder / PROMPTS_FILE)],
        "reward": [f"{folder}/reward.py:crashes_sometimes"],
        "out": str(folder / "run"),
        "num_updates": num_updates,
        "num_epochs": 2,
        "num_minibatches": 1,
        "num_prompts": 4,
        "learning_rate": LEARNING_RATE,
        "max_new_tokens": WORKLOAD.max_response,
        "checkpoint.every": SAVE_INTERVAL,
        "num_samples": 2,
    }
    return config_from_settings("ppo", settings)


def table(seen: Soak) -> Table:
    """Ten readings, each with the median time of the updates around it."""
    step = max(1, len(seen.readings) // 10)
    rows = [
        [
            f"{reading.update:,}",
            f"{reading.memory:.1f}",
            f"{reading.objects:,}",
            str(reading.files),
            str(reading.threads),
            str(reading.children),
            f"{1000 * seen.seconds_at(reading.update):.1f}",
        ]
        for reading in seen.readings[step - 1 :: step]
    ]
    header = ["update", "memory, MiB", "objects", "open files", "threads", "processes", "ms per update"]
    return Table("Soak", header, rows)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.soak", description="Check whether a long run leaks or slows down."
    )
    parser.add_argument("folder", type=Path, help="a new folder for the run and the figures")
    parser.add_argument("--updates", type=int, default=2000)
    parser.add_argument("--interval", type=int, default=20, help="updates between readings")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(table(soak(options.folder, num_updates=options.updates, interval=options.interval)).markdown())


if __name__ == "__main__":
    main()
