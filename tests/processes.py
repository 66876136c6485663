"""Lists running processes, for tests that none are left behind."""

import os
import subprocess
import time
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    """A process, its parent and its group."""

    pid: int
    parent: int
    group: int


def processes() -> list[Process]:
    """All processes; our own zombies are among them, not those that init has yet to collect."""
    rows = _from_proc() if Path("/proc/self/stat").exists() else _from_ps()
    return [row for state, row in rows if state != "Z" or row.parent == os.getpid()]


def members(group: int) -> list[int]:
    """The processes of a group."""
    return [process.pid for process in processes() if process.group == group]


def all_end(*groups: int, seconds: float = 10.0) -> bool:
    """Whether no process is left in these groups; the kernel needs a moment for those that it has just killed."""
    until = time.monotonic() + seconds
    while (left := any(map(members, groups))) and time.monotonic() < until:
        time.sleep(0.05)
    return not left


def children_with_a_group() -> set[int]:
    """Our children that lead a process group, as every worker does."""
    return {seen.pid for seen in processes() if seen.parent == os.getpid() and seen.pid == seen.group}


def _from_proc() -> list[tuple[str, Process]]:
    rows = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text()
        except OSError:  # it ended between the look and the reading
            continue
        # A program's name may hold anything, but the last parenthesis closes it.
        state, parent, group, *_ = text.rpartition(")")[2].split()
        rows.append((state, Process(int(path.parent.name), int(parent), int(group))))
    return rows


def _from_ps() -> list[tuple[str, Process]]:
    command = ["ps", "-A", "-o", "state=,pid=,ppid=,pgid="]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in listed.splitlines()]
    return [(state[0], Process(*map(int, numbers))) for state, *numbers in rows]
