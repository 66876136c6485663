"""Ensures that only one process at a time trains in a run's folder.

Two processes would interleave their logs and delete each other's checkpoints. This happens when a scheduler restarts a
job whose process is still running, or a sweep is resumed while some of its runs are still running.

The lock is on the folder itself, so it leaves no file and is released when the process ends for any reason. Windows and
some file systems do not support such locks; nothing is checked there.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from kedge_base.errors import OutputError
from kedge_base.machine.durable import make_folder
from kedge_base.run_folder.output import check_creatable, free_folders, is_free


@dataclass(frozen=True)
class _Claims:
    """The claims of the running stage.

    Attributes:
        kept: Releases them.
        chosen: The inodes of the folders from `claim_free_folder`, which the run claims when it starts.
    """

    kept: ExitStack
    chosen: set[int]


_current: ContextVar[_Claims | None] = ContextVar("current", default=None)

LONGEST_COMMAND = 200

MOST_ATTEMPTS = 1000
"""Maximum number of attempts to create a folder that other runs remove."""


@contextmanager
def claims() -> Iterator[None]:
    """Keep the claims made in the block until it ends. Each stage runs in such a block."""
    outer = _current.get()
    with ExitStack() as kept:
        token = _current.set(_Claims(kept, set() if outer is None else outer.chosen))
        try:
            yield
        finally:
            _current.reset(token)


def claim(folder: Path) -> None:
    """Claim a folder before reading anything in it that another process could still change.

    Outside of `claims`, only check that no other process has claimed it.

    Raises:
        OutputError: Another process trains in the folder; the line says which.
    """
    current = _current.get()
    if current is not None and _inode(folder) in current.chosen:
        current.chosen.discard(_inode(folder))
        return
    try:
        place = _lock(folder)
    except OutputError:
        raise
    except OSError:  # reported when the folder is read
        return
    if place is not None and current is not None:
        current.kept.callback(os.close, place)
    elif place is not None:
        os.close(place)


def claim_free_folder(path: Path) -> Path:
    """Create and claim the first folder of `path`, `path-2`, `path-3`, … that is free and unclaimed.

    Runs that start simultaneously get different folders. A folder that is still empty when the `claims` end is removed.

    Raises:
        OutputError: It cannot be created.
    """
    current = _current.get()
    assert current is not None
    for attempt in itertools.count():
        for folder in free_folders(path):
            created = [folder] if folder.parent.exists() else [folder, folder.parent]
            try:
                make_folder(folder)
                place = _lock(folder)
            except OutputError:  # the folder belongs to another run
                continue
            except (FileExistsError, FileNotFoundError) as error:
                if attempt < MOST_ATTEMPTS:
                    break  # a run that ended has removed it, or its parent folder
                raise OutputError(f"{folder} cannot be created: {error.strerror}") from error
            except OSError as error:
                check_creatable(folder)
                raise OutputError(f"{folder} cannot be created: {error.strerror}") from error
            if place is not None:
                current.kept.callback(os.close, place)
            # Its owner may just have ended, after filling or removing it.
            if folder.exists() and is_free(folder) and (place is None or os.fstat(place).st_ino == _inode(folder)):
                current.kept.callback(_remove_empty, created)  # before the lock is released
                current.chosen.add(_inode(folder))
                return folder
            break
    raise AssertionError


def _remove_empty(folders: Sequence[Path]) -> None:
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()


def _inode(folder: Path) -> int:
    try:
        return folder.stat().st_ino
    except OSError:
        return 0


def _lock(folder: Path) -> int | None:
    """Lock the folder and return its descriptor; None where folders cannot be locked.

    Raises:
        OSError: The folder does not exist, or locking fails for another reason.
        OutputError: Another process has locked it.
    """
    if sys.platform == "win32":
        return None
    import fcntl

    try:
        place = os.open(folder, os.O_RDONLY)
    except PermissionError:  # reported when the folder is read
        return None
    try:
        fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        inode = os.fstat(place).st_ino
        os.close(place)
        raise OutputError(_refusal(folder, inode)) from error
    except OSError:  # such as a network file system without locks
        os.close(place)
        return None
    return place


def _refusal(folder: Path, inode: int) -> str:
    """The error for a locked folder, with the process on this machine that holds the lock, if known."""
    owner = ""
    try:
        rows = [line.split() for line in Path("/proc/locks").read_text(encoding="ascii").splitlines()]
        [number] = {row[4] for row in rows if row[1] == "FLOCK" and row[5].rpartition(":")[2] == str(inode)}
        command = Path("/proc", number, "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        if number == str(os.getpid()):
            return f"this process is training in {folder} already; wait until that run ends, or close() its PpoTrainer"
        owner = f": process {number} ({command[:LONGEST_COMMAND]})"
    except (OSError, ValueError, IndexError):
        pass
    return f"another process is training in {folder}{owner}; wait until it ends, or stop it, before the run is resumed"
