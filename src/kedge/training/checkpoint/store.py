"""Checkpoints: folders that are whole or not there, checked byte by byte before anything is read from them.

    checkpoints/update-000123/
        policy.safetensors, optimizer.safetensors, …   tensors by name, a file per part
        state.json                                     numbers, texts, lists
        manifest.json                                  what this is, and each file's size and hash

A folder is written under another name beside, and renamed once the disk has all of it.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from kedge.errors import DataError, OutputError
from kedge.output import sync_folder
from kedge.training.checkpoint.hashed_files import read_tensors, tensor_pieces, write_file, write_files
from kedge.training.checkpoint.manifest import MANIFEST_FILE, Manifest, check_files, read_manifest
from kedge.training.checkpoint.state import check_state
from kedge.version import __version__

__all__ = ["Checkpoint", "clean_leftovers", "newest_valid", "open_checkpoint", "save_checkpoint"]

STATE_FILE = "state.json"
NAME = re.compile(r"update-(\d{6,})")
TEMPORARY = ".tmp-"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose every byte has been found as it was written.

    Attributes:
        folder: Where it lies.
        manifest: What it is.
        state: Everything that is no tensor.
    """

    folder: Path
    manifest: Manifest
    state: Mapping[str, Any]

    @property
    def update(self) -> int:
        """After which update it was saved."""
        return self.manifest.update

    def tensors(self, part: str) -> dict[str, Tensor]:
        """The tensors of one part, on the CPU.

        Raises:
            DataError: There is no such part.
        """
        name = _tensor_file(part)
        if name not in self.manifest.files:
            raise DataError(f"{self.folder}: has no {name}")
        return read_tensors(self.folder / name)


def save_checkpoint(
    folder: Path,
    *,
    update: int,
    kind: str,
    fingerprint: Mapping[str, str],
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
    keep: int,
) -> Path:
    """Save a run after an update, and only then delete what is too old; return the checkpoint's folder.

    A valid checkpoint of this very update stays as it is. Those of later updates are deleted: a run that is here again
    has left them behind.

    Args:
        folder: Where the run's checkpoints lie; made if need be. Leftovers of killed saves in it are deleted.
        update: Number of the update that the run has just finished, ≥ 0.
        kind: What kind of run it is.
        fingerprint: What the run was made from, by name; see `Manifest`.
        tensors: Groups of tensors; each group becomes a file of its name.
        state: Everything else, in JSON's types; see `check_state`.
        keep: How many checkpoints stay, ≥ 1.

    Raises:
        OutputError: The disk is full, or refuses otherwise. The checkpoints are those that there were.
        NumericsError: A number in the state is not finite; nothing is written.
    """
    check_state(state)
    text = json.dumps(state).encode()
    needed = len(text) + sum(tensor.nbytes for group in tensors.values() for tensor in group.values())

    def write(part: Path) -> None:
        pieces = {_tensor_file(name): tensor_pieces(group) for name, group in tensors.items()}
        files = write_files(part, {**pieces, STATE_FILE: [text]})
        manifest = Manifest(update, kind, fingerprint, __version__, files)
        write_file(part / MANIFEST_FILE, [manifest.to_bytes()])

    final = folder / f"update-{update:06d}"
    with _telling(folder, update=update, needed=needed):
        folder.mkdir(parents=True, exist_ok=True)
        clean_leftovers(folder)
        if not _is_valid(final):
            _write_beside(final, write)
        _delete_surplus(folder, update=update, keep=keep)
    return final


def newest_valid(folder: Path, *, on_rejected: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint that is whole, or None where none is.

    Args:
        folder: Where the run's checkpoints lie; it need not exist. Nothing in it is changed.
        on_rejected: Receives a line for each newer one, which names the file and what is wrong with it.
    """
    for path in reversed(_checkpoints(folder)):
        try:
            return open_checkpoint(path)
        except DataError as error:
            on_rejected(str(error))
    return None


def open_checkpoint(path: Path) -> Checkpoint:
    """A checkpoint, once all of it has been checked.

    Raises:
        DataError: It is not whole, or not one: the line names the file.
    """
    try:
        manifest = read_manifest(path / MANIFEST_FILE)
        if path.name != f"update-{manifest.update:06d}":
            raise DataError(f"{path}: is the checkpoint of update {manifest.update}, under another name")
        check_files(path, manifest.files)
        return Checkpoint(path, manifest, json.loads((path / STATE_FILE).read_bytes()))
    except OSError as error:
        raise DataError(f"{error.filename or path}: cannot be read ({error.strerror or error})") from error


def clean_leftovers(folder: Path) -> None:
    """Delete what killed saves left half written or half deleted: for the run that owns the folder, nobody else."""
    for path in folder.glob(f"{TEMPORARY}*"):
        _remove(path)


def _write_beside(final: Path, write: Callable[[Path], None]) -> None:
    """Have `write` fill a new folder, and give it its name, durably, once it is whole."""
    part = final.with_name(f"{TEMPORARY}{final.name}")
    part.mkdir()
    try:
        write(part)
        sync_folder(part)
        _delete(final)  # a broken one, if it is there at all
        part.rename(final)
    except BaseException:  # Ctrl-C, too: whatever ends the save, it is raised again
        shutil.rmtree(part, ignore_errors=True)
        raise
    sync_folder(final.parent)


def _delete_surplus(folder: Path, *, update: int, keep: int) -> None:
    past = [path for path in _checkpoints(folder) if _update_of(path) <= update]
    for path in _checkpoints(folder):
        if path not in past[-keep:]:
            _delete(path)


def _delete(path: Path) -> None:
    """Take a checkpoint's name away first, so that one that is half deleted is never taken for one."""
    if path.exists():
        _remove(path.rename(path.with_name(f"{TEMPORARY}old-{path.name}")))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _is_valid(path: Path) -> bool:
    try:
        open_checkpoint(path)
    except DataError:
        return False
    return True


def _checkpoints(folder: Path) -> list[Path]:
    """Whatever bears a checkpoint's name, in the order of their updates."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted((path for path in found if NAME.fullmatch(path.name)), key=_update_of)


def _update_of(path: Path) -> int:
    return int(path.name.removeprefix("update-"))


def _tensor_file(part: str) -> str:
    return f"{part}.safetensors"


@contextmanager
def _telling(folder: Path, *, update: int, needed: int) -> Iterator[None]:
    """Tell what the system refuses, and how much room the checkpoint takes.

    Raises:
        OutputError: The block raised an OSError.
    """
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"{folder}: the checkpoint of update {update} cannot be saved ({error.strerror or error}); "
            f"it needs {needed:,} bytes, and those that are there stay valid"
        ) from error
