"""Ensures that only one process at a time trains in a run's folder.

Two would interleave their logs and delete each other's checkpoints. It happens when a scheduler starts a job again
whose process still runs, or a sweep is continued whose runs outlived it.

The lock is on the folder itself, so that it leaves no file, and ends with the process, however it ends. Windows and
file systems without locks have none.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from pathlib import Path

from kedge.errors import OutputError

__all__ = ["claim", "claims"]

_kept: ContextVar[ExitStack | None] = ContextVar("kept", default=None)
"""The claims of the stage that runs."""

LONGEST_COMMAND = 200


@contextmanager
def claims() -> Iterator[None]:
    """What is claimed in the block is claimed until the block ends. A stage runs in such a block."""
    with ExitStack() as kept:
        token = _kept.set(kept)
        try:
            yield
        finally:
            _kept.reset(token)


def claim(folder: Path) -> None:
    """Claim a folder, before anything in it is read that another process could still change.

    Outside of `claims`, only check that no other process has claimed it.

    Raises:
        OutputError: Another process trains in the folder; the line says which.
    """
    place, kept = _lock(folder), _kept.get()
    if place is not None and kept is not None:
        kept.callback(os.close, place)
    elif place is not None:
        os.close(place)


def _lock(folder: Path) -> int | None:
    """A locked descriptor of the folder; None where folders cannot be locked."""
    if sys.platform == "win32":
        return None
    import fcntl

    try:
        place = os.open(folder, os.O_RDONLY)
    except OSError:  # reported by whoever reads the folder
        return None
    try:
        fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        inode = os.fstat(place).st_ino
        os.close(place)
        raise OutputError(
            f"another process is training in {folder}{_owner(inode)}; wait until it ends, or stop it, before the run "
            "is resumed"
        ) from error
    except OSError:  # such as a network file system without locks
        os.close(place)
        return None
    return place


def _owner(inode: int) -> str:
    """Which process of this machine has locked an inode, in words; empty where the system does not tell."""
    try:
        rows = [line.split() for line in Path("/proc/locks").read_text(encoding="ascii").splitlines()]
        [number] = {row[4] for row in rows if row[1] == "FLOCK" and row[5].rpartition(":")[2] == str(inode)}
        command = Path("/proc", number, "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except (OSError, ValueError, IndexError):
        return ""
    return f": process {number} ({command[:LONGEST_COMMAND]})"
