"""Writes files and folders that survive a power failure: under temporary names, forced to disk, then renamed.

A rename can reach the disk before the contents do, and then names an empty file. So everything that a later step relies
on is forced to disk first: the files, then their folder, and after the rename, the folder that contains it.

The temporary names are random and created exclusively, so that a planted link is never followed.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path

PART = re.compile(r"\..+\.[0-9a-f]{16}\.part")
"""Names of files and folders that are being written. Nothing else has such names, so leftovers may be deleted."""

UNSUPPORTED = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
"""Errors of a file system that does not have an operation."""


def replace_contents(path: Path, pieces: Iterable[bytes], *, forced: bool = True, mode: int = 0o666) -> None:
    """Replace a file atomically; a symbolic link of this name is replaced, not followed.

    Args:
        path: The file.
        pieces: Its new contents.
        forced: Force them to disk before the rename. Needed for everything that a later step relies on.
        mode: Permissions of the file, of which the umask is taken away.

    Raises:
        OSError: Writing fails; the file keeps its old contents.
    """
    part = temporary_name(path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(part, flags, mode)
    try:
        with open(descriptor, "wb") as file:
            file.writelines(pieces)
            file.flush()
            if forced:
                sync(file.fileno())
        part.replace(path)
    except BaseException:  # includes KeyboardInterrupt; re-raised
        part.unlink(missing_ok=True)
        raise
    if forced:
        sync_folder(path.parent)


@contextmanager
def replaced_folder(folder: Path, *, forced: bool = True) -> Iterator[Path]:
    """Yield a new folder to fill, which replaces `folder` when the block ends without an error.

    Args:
        folder: The folder to create or replace; its parents are created.
        forced: Force it to disk before the rename; otherwise the caller must.

    Raises:
        OSError: Writing fails; the old folder is kept, and the new one is removed.
    """
    make_folder(folder.parent)
    part = temporary_name(folder)
    old = temporary_name(folder)
    part.mkdir()
    try:
        yield part
        share_as_usual(part)
        if forced:
            sync_tree(part)
        if os.path.lexists(folder):
            rename_folder(folder, old)
        rename_folder(part, folder)
    except BaseException:  # includes KeyboardInterrupt; re-raised
        if os.path.lexists(old) and not os.path.lexists(folder):
            old.rename(folder)
        shutil.rmtree(part, ignore_errors=True)
        raise
    if forced:
        sync_folder(folder.parent)
    _remove(old)


def make_folder(folder: Path) -> None:
    """Create a folder and its parents durably; do nothing if it exists.

    Raises:
        OSError: The system refuses.
    """
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for place in missing:
        sync_folder(place.parent)


def is_part(path: Path) -> bool:
    """True if this is a file or folder that is being written, or that a killed process left unfinished."""
    return PART.fullmatch(path.name) is not None


def remove_parts(folder: Path) -> None:
    """Delete leftovers of killed processes. Call only while holding the folder's lock."""
    for path in folder.iterdir():
        if is_part(path):
            _remove(path)


def sync_tree(folder: Path) -> None:
    """Force all files of a folder to disk, then all entries of it and of its subfolders."""
    for place, _, names in os.walk(folder, topdown=False):
        for name in names:
            path = Path(place, name)
            if stat.S_ISREG(path.lstat().st_mode):
                _sync_file(path)
        sync_folder(Path(place))


def sync_folder(folder: Path) -> None:
    """Force a folder's entries to disk: only then is a new or renamed file safe."""
    if sys.platform == "win32":  # cannot open folders, and forces entries itself
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def sync(descriptor: int) -> None:
    """Force an open file or folder to disk, if its file system can: some network and FUSE mounts cannot."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise


def rename_folder(folder: Path, target: Path) -> None:
    """Rename a folder.

    Raises:
        OSError: Renaming fails. The message says so if the file system cannot rename folders, like object stores and
            container layers.
    """
    try:
        folder.rename(target)
    except OSError as error:
        if error.errno not in (*UNSUPPORTED, errno.EPERM, errno.EXDEV):
            raise
        reason = f"its file system cannot rename folders ({error.strerror}); choose another one"
        raise OSError(error.errno, reason, str(target)) from error


def check_renaming(folder: Path) -> None:
    """Check that folders in a folder can be renamed, as required to write models and checkpoints.

    Raises:
        OSError: They cannot.
    """
    before = temporary_name(folder / "renamed")
    after = temporary_name(folder / "renamed")
    before.mkdir()
    try:
        rename_folder(before, after)
    finally:
        for place in (before, after):
            with suppress(FileNotFoundError):
                place.rmdir()


def copy_tree(source: Path, target: Path, *, leave_out: str = "") -> None:
    """Copy the files of a folder and its subfolders; new files have the usual permissions, not the source's.

    Args:
        source: The folder.
        target: The new folder, which may exist.
        leave_out: Pattern of file names.
    """
    for place, _, names in os.walk(source, followlinks=True):
        folder = target / Path(place).relative_to(source)
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            if not fnmatch(name, leave_out):
                shutil.copyfile(Path(place, name), folder / name)


def share_as_usual(folder: Path) -> None:
    """Give each file of a folder the permissions of a newly created one: the umask determines who may read it.

    safetensors writes through a temporary file that only its owner may read.
    """
    probe = folder / ".permissions"
    probe.touch()
    mode = stat.S_IMODE(probe.stat().st_mode)
    probe.unlink()
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink() and stat.S_IMODE(path.stat().st_mode) != mode:
            with suppress(OSError):  # a mount may have the same permissions for all files
                path.chmod(mode)


def temporary_name(path: Path) -> Path:
    """Make a random name next to a path. `remove_parts` deletes files that a killed process leaves under such names."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")


def _sync_file(path: Path) -> None:
    # Windows can only flush files that are open for writing; elsewhere, that would needlessly require write permission.
    with path.open("rb+" if sys.platform == "win32" else "rb") as file:
        sync(file.fileno())


def _remove(path: Path) -> None:
    """Delete a file, a link or a folder, as far as possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
