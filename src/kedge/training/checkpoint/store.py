"""Atomic, hashed checkpoints: a folder is complete or absent, and every byte is checked before it is loaded.

    checkpoints/update-000123/
        model/                                         the model, in Hugging Face format
        policy.safetensors, optimizer.safetensors, …   all other tensors by name, one file per group
        state.json                                     numbers, strings, lists
        manifest.json                                  metadata, and the size and hash of every file

In a large run with sharded weights, a group is a folder with a file per rank, and model/ has no weights:

    actor_critic/shard-00001-of-00002.safetensors, …

A folder is written under a temporary name in the same place, synced to disk, and renamed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from kedge.ranks import ALONE, Ranks
from kedge.ranks.sharding import StoredTensors, shard_name
from kedge.training.checkpoint.files import (
    MANIFEST_FILE,
    FileRecord,
    Manifest,
    check_files,
    read_manifest,
    tensor_pieces,
    write_files,
)
from kedge.training.checkpoint.model_folder import (
    WEIGHTS_FILE,
    CheckpointModel,
    SavedModel,
    weight_files,
)
from kedge.training.checkpoint.shards import write_shards
from kedge_base.errors import DataError, NumericsError, OutputError
from kedge_base.machine.durable import (
    make_folder,
    remove_parts,
    replaced_folder,
    sync_folder,
    sync_tree,
    temporary_name,
)
from kedge_base.run_folder.output import MODEL_FOLDER, checkpoints_in, refusal
from kedge_base.version import __version__

STATE_FILE = "state.json"


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint: every file matches the manifest's hash.

    Attributes:
        folder: The checkpoint's folder.
        manifest: Its manifest.
        state: Everything but tensors.
    """

    folder: Path
    manifest: Manifest
    state: Mapping[str, Any]

    @property
    def update(self) -> int:
        """The update after which it was saved."""
        return self.manifest.update

    def tensors(self, group: str) -> dict[str, Tensor]:
        """The tensors of one group, on the CPU.

        Raises:
            DataError: There is no such group.
        """
        return dict(self.stored(group))

    def stored(self, group: str) -> StoredTensors:
        """The same tensors, read on access, in full or only some rows."""
        count = self.manifest.shards.get(group)
        names = [_tensor_file(group)] if count is None else [shard_name(group, each, count) for each in range(count)]
        for name in names:
            if name not in self.manifest.files:
                raise DataError(f"{self.folder}: {name} is missing")
        held = self.manifest.held.get(group)
        models = weight_files(self.folder / MODEL_FOLDER) if held else []
        return StoredTensors([*((self.folder / name, None) for name in names), *((path, held) for path in models)])


def save_checkpoint(
    folder: Path,
    *,
    update: int,
    kind: str,
    fingerprint: Mapping[str, str],
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
    keep: int,
    model: CheckpointModel | None = None,
    gathered: Mapping[Tensor, Tensor] | None = None,
    shards: Mapping[str, Mapping[str, Tensor]] | None = None,
    ranks: Ranks = ALONE,
    protected: Collection[int] = (),
) -> Path:
    """Save a run after an update, then delete old checkpoints; return the new checkpoint's folder.

    An existing valid checkpoint of the same update is kept. Checkpoints of later updates are deleted: they
    belong to a continuation that the run has abandoned.

    Args:
        folder: The run's checkpoint folder, created if missing. Leftovers of killed saves in it are deleted.
        update: Number of the update just finished, ≥ 0.
        kind: Kind of run; see `Manifest`.
        fingerprint: The run's inputs; see `Manifest`.
        tensors: Groups of tensors; each group becomes a file with its name.
        state: Everything else, as JSON values; see `check_state`.
        keep: Number of checkpoints to keep, ≥ 1.
        model: The model to save with it; weights that it contains are not stored again.
        gathered: The full weights of the model's sharded modules; see `gather`.
        shards: Additional groups; each becomes a folder with a file per rank, and the model gets no weights.
        ranks: The ranks that write the shards; all of them call this and share the folder. The first one does the rest.
        protected: Updates whose checkpoints are always kept.

    Raises:
        OutputError: A write fails, for example because the disk is full; raised on every rank. Existing checkpoints are
            unchanged.
        NumericsError: A number in the state is not finite; nothing is written.
    """
    check_state(state)
    text = json.dumps(state).encode()
    shards = shards or {}
    final = folder / f"update-{update:06d}"
    needed = len(text) + sum(
        tensor.numel() * tensor.element_size()
        for group in (*tensors.values(), *shards.values())
        for tensor in group.values()
    )
    refused = partial(_output_errors, folder, update=update, needed=needed)

    def fill(part: Path, in_shards: Mapping[str, FileRecord]) -> None:
        saved = SavedModel()
        if model is not None:
            saved = model.write(part / MODEL_FOLDER, update, tensors, gathered or {}, shards)
        contents = {
            _tensor_file(group): tensor_pieces(
                {name: tensor for name, tensor in each.items() if name not in saved.held.get(group, {})}
            )
            for group, each in tensors.items()
        }
        if saved.weights:
            contents[f"{MODEL_FOLDER}/{WEIGHTS_FILE}"] = tensor_pieces(saved.weights, metadata={"format": "pt"})
        files = {**saved.files, **in_shards, **write_files(part, {**contents, STATE_FILE: [text]})}
        if model is not None:
            sync_tree(part / MODEL_FOLDER)
        for group in shards:
            sync_folder(part / group)
        manifest = Manifest(
            update, kind, fingerprint, __version__, files, saved.held, dict.fromkeys(shards, ranks.count)
        )
        write_files(part, {MANIFEST_FILE: [manifest.to_bytes()]})
        sync_folder(part)

    with ExitStack() as replacing:  # on the first rank

        def begin() -> str | None:
            with refused():
                make_folder(folder)
                remove_parts(folder)
                with suppress(DataError):  # it is missing or invalid
                    open_checkpoint(final)
                    return None
                part = replacing.enter_context(replaced_folder(final, forced=False))
                for group in shards:
                    (part / group).mkdir()
                return str(part)

        def finish() -> None:
            with refused():
                if begun is not None:
                    fill(Path(begun), in_shards)
                    replacing.close()
                    sync_folder(folder)
                _delete_surplus(folder, update=update, keep=keep, protected=protected)

        begun = ranks.first(begin)
        with refused():
            in_shards = {} if begun is None else write_shards(Path(begun), shards, ranks)
        ranks.first(finish)
    return final


def newest_valid(folder: Path, *, on_rejected: Callable[[str], None], ranks: Ranks = ALONE) -> Checkpoint | None:
    """The newest valid checkpoint, or None.

    Args:
        folder: The run's checkpoint folder; it need not exist and is not modified.
        on_rejected: Receives one line for each newer invalid checkpoint: the file and its fault.
        ranks: Share the checks: all of them call this and get the same result.
    """
    for _, path in reversed(checkpoints_in(folder)):
        try:
            return open_checkpoint(path, ranks)
        except DataError as error:
            on_rejected(str(error))
    return None


def open_checkpoint(path: Path, ranks: Ranks = ALONE) -> Checkpoint:
    """Open a checkpoint after checking all of it.

    Args:
        path: Its folder.
        ranks: Share the checks: all of them call this.

    Raises:
        DataError: A file is missing, damaged or unexpected; the message names it. Raised on every rank.
    """
    found = None
    problem = None
    try:
        found = _opened(path, ranks)
    except DataError as error:
        problem = str(error)
    if problems := [each for each in ranks.messages(problem) if each is not None]:
        raise DataError(problems[0])
    assert found is not None
    return found


def _opened(path: Path, ranks: Ranks) -> Checkpoint:
    try:
        manifest = read_manifest(path / MANIFEST_FILE)
        if path.name != f"update-{manifest.update:06d}":
            raise DataError(f"{path}: contains the checkpoint of update {manifest.update}; the folder was renamed")
        check_files(path, manifest.files, ranks)
        return Checkpoint(path, manifest, json.loads((path / STATE_FILE).read_bytes()))
    except OSError as error:
        raise DataError(f"{error.filename or path}: cannot be read ({error.strerror or error})") from error


def _delete_surplus(folder: Path, *, update: int, keep: int, protected: Collection[int]) -> None:
    """Rename checkpoints before deleting them, so that a partly deleted one is never mistaken for a checkpoint."""
    found = checkpoints_in(folder)
    past = [number for number, _ in found if number <= update]
    kept = {*past[-keep:]} | ({*past} & {*protected})
    for number, path in found:
        if number not in kept:
            path.rename(temporary_name(path))
    remove_parts(folder)


def _tensor_file(group: str) -> str:
    return f"{group}.safetensors"


@contextmanager
def _output_errors(folder: Path, *, update: int, needed: int) -> Iterator[None]:
    """Convert OS errors into an OutputError that says how much space the checkpoint needs.

    Raises:
        OutputError: A system call in the block failed.
    """
    try:
        yield
    except Exception as error:
        reason = refusal(error)
        if reason is None:
            raise
        raise OutputError(
            f"{folder}: the checkpoint of update {update} cannot be saved ({reason}); "
            f"it needs {needed:,} bytes; existing checkpoints are unchanged"
        ) from error


def check_state(value: Any, name: str = "state") -> None:
    """Check that a value survives a round trip through JSON unchanged: no tuples, no NaN.

    Raises:
        TypeError: It contains something other than dicts with string keys, lists, strings, numbers, bools and None.
        NumericsError: A number is not finite.
    """
    if isinstance(value, float) and not math.isfinite(value):
        raise NumericsError(f"{name} is {value}; only finite numbers can be saved")
    if type(value) is dict and all(type(key) is str for key in value):
        for key, entry in value.items():
            check_state(entry, f"{name}.{key}")
    elif type(value) is list:
        for index, entry in enumerate(value):
            check_state(entry, f"{name}[{index}]")
    elif value is not None and type(value) not in (str, int, float, bool):
        raise TypeError(f"{name} is of type {type(value).__name__}, which JSON cannot represent unchanged")
