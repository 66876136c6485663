"""What the name of a model means: a folder, a run's model, or the model in one of its checkpoints.

runs/ppo          the model of the run (runs/ppo/model)
runs/ppo@8        the model after update 8 (runs/ppo/checkpoints/update-000008/model)
runs/ppo@best     the model of the best checkpoint
anything else     itself: a folder with config.json, that of an adapter, or a hub id
"""

from __future__ import annotations

import os
from pathlib import Path

from kedge.errors import ModelError
from kedge.system.output import MODEL_FOLDER, best_checkpoint, checkpoint_folder, is_run, kept_checkpoints

__all__ = ["SHARDED_WEIGHTS", "find_model"]

CONFIGS, MANIFEST = ("config.json", "adapter_config.json"), "manifest.json"
SHARDED_WEIGHTS = "sharded_weights.json"
"""In the model of a checkpoint whose weights are in shards: for each weight, its group and its name there."""


def find_model(source: str | Path, *, in_shards: bool = False) -> str:
    """The folder or hub id that a model's name stands for. A folder of that very name comes first.

    Args:
        source: The name.
        in_shards: Whether its weights may be in a checkpoint's shards.

    Raises:
        ModelError: The run has no such checkpoint, no model yet, or does not exist; the line lists what there is. Or
            the weights are in shards.
    """
    found = _find(source)
    if not in_shards and os.path.isfile(Path(found) / SHARDED_WEIGHTS):
        raise ModelError(
            f"model {str(source)!r}: the weights of this checkpoint are in one file per rank; make a model of it: "
            f"kedge merge {source} --out FOLDER"
        )
    return found


def _find(source: str | Path) -> str:
    folder = Path(os.path.expanduser(source))
    if os.path.isdir(folder):
        return str(folder if _is_model(folder) else _inside(folder, str(source)))
    run, at, which = str(source).rpartition("@")
    if not at or os.path.isfile(folder):
        return str(source)
    if not is_run(Path(run)):  # no hub id contains @
        raise ModelError(f"model {str(source)!r}: {run!r} is not the folder of a run")
    return str(_checkpoint(Path(os.path.expanduser(run)), which, str(source)) / MODEL_FOLDER)


def _is_model(folder: Path) -> bool:
    """Whether a folder has a model or an adapter."""
    return any(os.path.isfile(folder / name) for name in CONFIGS)


def _inside(folder: Path, source: str) -> Path:
    """The model of a run or of a checkpoint; any other folder is returned as it is."""
    model = folder / MODEL_FOLDER
    if _is_model(model):
        return model
    if is_run(folder):
        raise ModelError(f"model {source!r}: the run has written no model yet; {_kept(folder)}")
    if os.path.isfile(folder / MANIFEST):
        raise ModelError(f"model {source!r}: {_without_model(folder)}")
    return folder


def _checkpoint(run: Path, which: str, source: str) -> Path:
    best = best_checkpoint(run)
    if which == "best" and best is None:
        raise ModelError(f"model {source!r}: the run kept no best checkpoint; {_kept(run)}")
    if which != "best" and not which.isdecimal():
        raise ModelError(f"model {source!r}: @ is followed by the number of an update, or by best; {_kept(run)}")
    update = best if which == "best" else int(which)
    if update is None or update not in kept_checkpoints(run):
        raise ModelError(f"model {source!r}: the run has no checkpoint of update {which}; {_kept(run)}")
    folder = checkpoint_folder(run, update)
    if not _is_model(folder / MODEL_FOLDER):
        raise ModelError(f"model {source!r}: {_without_model(folder)}")
    return folder


def _kept(run: Path) -> str:
    """The checkpoints that there are."""
    best = best_checkpoint(run)
    updates = [f"{update} (best)" if update == best else str(update) for update in kept_checkpoints(run)]
    return f"it has checkpoints of updates {', '.join(updates)}" if updates else "it has no checkpoints"


def _without_model(folder: Path) -> str:
    return f"the checkpoint {folder.name} has no model, since an older version of kedge saved it"
