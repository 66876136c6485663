"""The model in a checkpoint: a loadable folder; the checkpoint does not store its weights a second time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from kedge.errors import KedgeError, ModelError
from kedge.models.sources import SHARDED_WEIGHTS
from kedge.system.durable import sync, sync_folder, temporary_name
from kedge.system.output import MODEL_FOLDER
from kedge.system.ranks.sharding import whole_state_dict
from kedge.training.checkpoint.files import FileRecord, record_file

__all__ = ["WEIGHTS_FILE", "CheckpointModel", "SavedModel", "weight_files"]

WEIGHTS_FILE = "model.safetensors"


@dataclass(frozen=True)
class SavedModel:
    """The parts of a checkpoint's model.

    Attributes:
        held: By group of tensors and tensor: the name in the model's files under which they hold the same bits.
        files: Records of the files written so far, by path relative to the model's folder.
        weights: The content of `WEIGHTS_FILE`, if it is not written yet; otherwise empty.
    """

    held: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    files: Mapping[str, FileRecord] = field(default_factory=dict)
    weights: Mapping[str, Tensor] = field(default_factory=dict)

    def sync(self, folder: Path) -> None:
        """Flush the files to disk."""
        for name in self.files:
            with (folder / name).open("rb+") as file:
                sync(file.fileno())
        sync_folder(folder)


class CheckpointModel:
    """The model that every checkpoint of a run contains.

    Some architectures are converted when they are saved, so the first save compares the files with the weights. If they
    are bit-identical, in one file, later saves leave the weights to the checkpoint, which hashes as it writes.

    Args:
        module: The trained transformers model.
        save: Saves it in a folder, as the model after an update. The third argument is the weights to save; None for
            the model's own.
    """

    def __init__(self, module: nn.Module, save: Callable[[Path, int, dict[str, Tensor] | None], object]) -> None:
        self.module = module
        self._save = save
        self._is_plain = False

    def try_saving(self, folder: Path) -> None:
        """Save everything but the weights, and delete it: a model that cannot be saved must be found before training.

        Args:
            folder: An existing folder.

        Raises:
            ModelError: transformers refuses, such as for settings in `config.json` that exclude each other.
            OutputError: The folder cannot be written.
        """
        trial = temporary_name(folder / MODEL_FOLDER)
        try:
            self._save(trial, 0, {})
        except KedgeError:
            raise
        except Exception as error:  # the model's code may raise anything
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ModelError(f"the trained model could not be saved with its config.json as it is: {reason}") from error
        finally:
            shutil.rmtree(trial, ignore_errors=True)

    def parameters(self) -> list[nn.Parameter]:
        """The model's parameters, trained or not."""
        return list(self.module.parameters())

    def write(
        self,
        folder: Path,
        update: int,
        groups: Mapping[str, Mapping[str, Tensor]],
        gathered: Mapping[Tensor, Tensor] | None = None,
    ) -> SavedModel:
        """Save the model without syncing it, and find out which tensors need not be stored elsewhere.

        Args:
            folder: The model's folder, which does not exist yet.
            update: The update just finished.
            groups: The tensors that the checkpoint must restore, whole.
            gathered: The whole weights of those that are in parts; see `gather`.

        Raises:
            OSError: A file cannot be written.
        """
        gathered = gathered or {}
        parameters = {name: gathered.get(weight, weight) for name, weight in self.module.named_parameters()}
        own = {id(weight): name for name, weight in parameters.items()}
        named = {
            group: {name: own[id(tensor)] for name, tensor in tensors.items() if id(tensor) in own}
            for group, tensors in groups.items()
        }
        if self._is_plain:
            files = self._write_without_weights(folder, update)
            weights = {saved: parameters[saved] for names in named.values() for saved in names.values()}
            return SavedModel(_nonempty(named), files, weights)
        self._save(folder, update, whole_state_dict(self.module, gathered) if gathered else None)
        held = {group: _equal(folder, names, groups[group]) for group, names in named.items()}
        self._is_plain = _only_holds(folder, {saved for names in held.values() for saved in names.values()})
        return SavedModel(_nonempty(held), _records(folder))

    def write_beside_shards(self, folder: Path, update: int, groups: Mapping[str, Mapping[str, Tensor]]) -> SavedModel:
        """Save everything but the weights, and where in the shards they are.

        Args:
            folder: The model's folder, which does not exist yet.
            update: The update just finished.
            groups: The tensors in the shards.

        Raises:
            OSError: A file cannot be written.
        """
        self._write_without_weights(folder, update)
        places = {id(tensor): (group, name) for group, tensors in groups.items() for name, tensor in tensors.items()}
        own = self.module.state_dict(keep_vars=True)
        found = {name: places[id(tensor)] for name, tensor in own.items() if id(tensor) in places}
        (folder / SHARDED_WEIGHTS).write_text(json.dumps(found), encoding="utf-8")
        return SavedModel(files=_records(folder))

    def _write_without_weights(self, folder: Path, update: int) -> dict[str, FileRecord]:
        self._save(folder, update, {})
        (folder / WEIGHTS_FILE).unlink(missing_ok=True)
        return _records(folder)


def _equal(folder: Path, names: Mapping[str, str], tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The names of weights that are bit-identical in the files, with their names there."""
    equal: dict[str, str] = {}
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            present = set(file.keys())
            for name, saved in names.items():
                if saved in present and _same_bits(file.get_tensor(saved), tensors[name]):
                    equal[name] = saved
    return equal


def _same_bits(saved: Tensor, tensor: Tensor) -> bool:
    if (saved.shape, saved.dtype) != (tensor.shape, tensor.dtype):
        return False
    one, other = (each.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for each in (saved, tensor))
    return torch.equal(one, other)


def _only_holds(folder: Path, names: set[str]) -> bool:
    """True if the model's weights are in one file with exactly these names."""
    if not (folder / WEIGHTS_FILE).is_file():
        return False
    with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
        return set(file.keys()) == names


def weight_files(folder: Path) -> list[Path]:
    """The files of a saved model's weights, without a value head's."""
    return sorted(folder.glob("model*.safetensors"))


def _records(folder: Path) -> dict[str, FileRecord]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): record_file(path) for path in paths}


def _nonempty(named: Mapping[str, Mapping[str, str]]) -> dict[str, Mapping[str, str]]:
    return {group: names for group, names in named.items() if names}
