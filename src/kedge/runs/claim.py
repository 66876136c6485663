"""Ensures that only one process at a time trains in a run's folder.

Two would interleave their logs and delete each other's checkpoints. It happens when a scheduler starts a job again
whose process still runs, or a sweep is continued whose runs outlived it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kedge.errors import OutputError

__all__ = ["check_unclaimed", "claimed"]


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """While the block runs, no other process can claim the folder; the claim ends with the process, however it ends.

    The lock is on the folder itself, so that it leaves no file. Windows and file systems without locks have none.

    Raises:
        OutputError: Another process trains in the folder.
    """
    place = _lock(folder)
    try:
        yield
    finally:
        if place is not None:
            os.close(place)


def check_unclaimed(folder: Path) -> None:
    """Check that no other process trains in a folder.

    Raises:
        OutputError: One does.
    """
    with claimed(folder):
        pass


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
        os.close(place)
        raise OutputError(
            f"another process is training in {folder}; wait until it ends, or stop it, before the run is resumed"
        ) from error
    except OSError:  # such as a network file system without locks
        os.close(place)
        return None
    return place
