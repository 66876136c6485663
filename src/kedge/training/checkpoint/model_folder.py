"""The model in a checkpoint: a loadable folder, whose weights are not stored a second time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from kedge.models.sources import SHARDED_WEIGHTS
from kedge.ranks.sharding import StoredTensors, whole_state_dict
from kedge.training.checkpoint.files import FileRecord, record_files
from kedge_base.errors import KedgeError, ModelError
from kedge_base.machine.durable import temporary_name
from kedge_base.run_folder.output import MODEL_FOLDER
from kedge_base.texts import error_text

WEIGHTS_FILE = "model.safetensors"


@dataclass(frozen=True)
class SavedModel:
    """The parts of a checkpoint's model.

    Attributes:
        held: For each group and tensor, the name under which the model's files contain the same bits.
        files: Records of the files written so far, by path relative to the checkpoint.
        weights: The content of `WEIGHTS_FILE` if it has not been written yet; otherwise empty.
    """

    held: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    files: Mapping[str, FileRecord] = field(default_factory=dict)
    weights: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(eq=False)
class CheckpointModel:
    """The model that every checkpoint of a run contains.

    Some architectures are converted when they are saved, so the first save compares the files with the weights. If they
    are bit-identical, in one file, later saves let the checkpoint write the weights, one tensor at a time.

    Args:
        module: The trained transformers model.
        save: Saves it in a folder, as the model after an update. The third argument is the weights to save; None for
            the model's own.
    """

    module: nn.Module
    save: Callable[[Path, int, dict[str, Tensor] | None], object]
    _is_plain = False

    def try_saving(self, folder: Path) -> None:
        """Save everything but the weights, then delete it, so that a model that cannot be saved is detected before
        training.

        Raises:
            ModelError: transformers refuses to save it, for example because of incompatible settings in `config.json`.
            OutputError: The folder cannot be written.
        """
        trial = temporary_name(folder / MODEL_FOLDER)
        try:
            self.save(trial, 0, {})
        except KedgeError:
            raise
        except Exception as error:  # the model's code may raise anything
            reason = f"the trained model could not be saved with its config.json as it is: {error_text(error)}"
            raise ModelError(reason) from error
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
        gathered: Mapping[Tensor, Tensor],
        shards: Mapping[str, Mapping[str, Tensor]],
    ) -> SavedModel:
        """Save the model without syncing it, and find out which tensors need not be stored elsewhere.

        Args:
            folder: The model's folder, which does not exist yet.
            update: The update just finished.
            groups: The unsharded tensors that the checkpoint must restore.
            gathered: The full weights of sharded modules; see `gather`.
            shards: Tensors in the checkpoint's shards. If there are any, the model's folder has no weights, but a file
                with their locations in the shards.

        Raises:
            OSError: A file cannot be written.
        """
        parameters = {name: gathered.get(weight, weight) for name, weight in self.module.named_parameters()}
        own = {id(weight): name for name, weight in parameters.items()}
        held = {
            group: {name: own[id(tensor)] for name, tensor in tensors.items() if id(tensor) in own}
            for group, tensors in groups.items()
        }
        weights: dict[str, Tensor] = {}
        if shards or self._is_plain:
            self.save(folder, update, {})
            (folder / WEIGHTS_FILE).unlink(missing_ok=True)
            weights = {saved: parameters[saved] for names in held.values() for saved in names.values()}
        else:
            self.save(folder, update, whole_state_dict(self.module, gathered) if gathered else None)
            stored = StoredTensors((path, None) for path in weight_files(folder))
            for group, names in held.items():
                held[group] = {
                    name: saved
                    for name, saved in names.items()
                    if saved in stored and _same_bits(stored[saved], groups[group][name])
                }
            names = {saved for names in held.values() for saved in names.values()}
            self._is_plain = (folder / WEIGHTS_FILE).is_file() and stored.keys() == names
        if shards:
            places = {id(each): (group, name) for group, tensors in shards.items() for name, each in tensors.items()}
            state = self.module.state_dict(keep_vars=True)
            found = {name: places[id(tensor)] for name, tensor in state.items() if id(tensor) in places}
            (folder / SHARDED_WEIGHTS).write_text(json.dumps(found), encoding="utf-8")
        files = {f"{folder.name}/{name}": record for name, record in record_files(folder).items()}
        return SavedModel(held, files, weights)


def _same_bits(saved: Tensor, tensor: Tensor) -> bool:
    if (saved.shape, saved.dtype) != (tensor.shape, tensor.dtype):
        return False
    one, other = (each.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for each in (saved, tensor))
    return torch.equal(one, other)


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a saved model, without those of a value head."""
    return sorted(folder.glob("model*.safetensors"))
