"""Where a run may write: a folder that nobody has written to, on a disk that takes it."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kedge.errors import OutputError

__all__ = [
    "CONFIG_FILE",
    "FINISHED_FILE",
    "INCIDENTS_FILE",
    "LEFT_BEHIND",
    "REJECTED_FILE",
    "REWARD_LOG",
    "ROLES_FILE",
    "check_output",
    "first_free_folder",
    "is_run",
    "replace_file",
    "sync_folder",
    "writing",
]

CONFIG_FILE = "config.yaml"
"""What a run was made under. A folder that holds it is a run's."""

FINISHED_FILE = "finished.json"
"""What a run leaves that has come to its end."""

ROLES_FILE = "roles.json"
"""Which models take part in a run, and how large they are."""

REJECTED_FILE = "rejected.jsonl"
"""The rows that cannot be used. Readers write it before a run starts."""

REWARD_LOG = "reward.log"
"""What reward functions print and raise."""

INCIDENTS_FILE = "incidents.jsonl"
"""What a run met that must not be learnt from."""

LEFT_BEHIND = frozenset({REJECTED_FILE, REWARD_LOG, INCIDENTS_FILE})
"""What tells why a run came to nothing. A folder that holds nothing else is free."""


def check_output(path: str | os.PathLike[str]) -> Path:
    """The folder, once it is shown to be free and, as far as can be told without making it, possible to make.

    Raises:
        OutputError: Something is in it, or the nearest folder above it that exists is none or is write-protected.
    """
    folder = Path(os.path.expanduser(path))
    _check_name(folder)
    nearest = next((place for place in (folder, *folder.parents) if os.path.exists(place)), folder)
    if not os.path.isdir(nearest):
        raise OutputError(f"{folder} cannot be made: {nearest} is not a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise OutputError(f"{folder} cannot be made: {nearest} may not be written to")
    with writing(folder):
        free = _is_free(folder)
    if not free:
        raise OutputError(f"{path} already holds something; give another --out, or empty it")
    return folder


def _check_name(folder: Path) -> None:
    """Refuse what no folder can be called: the system says so at once, before anything is loaded."""
    if str(folder).startswith("~"):
        raise OutputError(f"{folder} cannot be made: there is no user of that name")
    try:
        folder.lstat()
    except (FileNotFoundError, NotADirectoryError, PermissionError):  # told below, with the folder that is in the way
        pass
    except OSError as error:
        raise OutputError(f"{folder} cannot be made: {error.strerror or error}") from error
    except ValueError as error:  # a NUL, or half of a surrogate pair
        raise OutputError(f"{folder} cannot be made: {error}") from error


def first_free_folder(path: Path) -> Path:
    """The first of `path`, `path-2`, `path-3`, … that is free."""
    names = itertools.chain([path.name], (f"{path.name}-{number}" for number in itertools.count(2)))
    return next(folder for name in names if _is_free(folder := path.with_name(name)))


def is_run(folder: Path) -> bool:
    """Whether a run was begun in this folder."""
    return os.path.isfile(os.path.join(os.path.expanduser(folder), CONFIG_FILE))


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Tell what the system refuses (a full disk, missing rights, a file in the way) in one line that names the path.

    Raises:
        OutputError: The block raised an OSError.
    """
    try:
        yield
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror or error}") from error


def replace_file(path: Path, pieces: Iterable[bytes]) -> None:
    """Write a file anew so that a kill or a power cut leaves it as it was or as it shall be, never between.

    Raises:
        OutputError: The system refuses; the file is as it was.
    """
    part = path.with_name(f"{path.name}.part")
    with writing(path):
        try:
            with part.open("wb") as file:
                file.writelines(pieces)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Have the disk take a folder's names now: a new or renamed file is safe only from then on."""
    if sys.platform == "win32":  # which opens no folders, and takes names at once
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_free(folder: Path) -> bool:
    if os.path.isdir(folder):
        return all(path.name in LEFT_BEHIND for path in folder.iterdir())
    return not os.path.exists(folder)
