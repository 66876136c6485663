"""Resolves the name of a model to a folder or hub id: a folder, a run, a checkpoint of it, an adapter, or a GGUF file.

runs/ppo          the model of the run (runs/ppo/model)
runs/ppo@8        the model after update 8 (runs/ppo/checkpoints/update-000008/model)
runs/ppo@best     the model of the best checkpoint
path/model.gguf   a folder of the cache with the model in this file
package:NAME      the same of the GGUF file in an installed package; package:NAME/FILE.gguf if it has several
anything else     itself: a folder with config.json, an adapter's folder, or a hub id
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from huggingface_hub import try_to_load_from_cache

from kedge.downloads import adapter_snapshot, has_whole_weights, hub_fault, two_models
from kedge.models.adapters import ADAPTER_CONFIG, AdapterFolder, is_adapter, read_adapter
from kedge.models.sources.gguf_files import find_gguf, gguf_folder
from kedge_base.errors import ModelError
from kedge_base.run_folder.output import (
    MODEL_FOLDER,
    best_checkpoint,
    checkpoint_folder,
    is_run,
    kept_checkpoints,
    run_stage,
)
from kedge_base.texts import pointer_fault

CONFIGS = ("config.json", "adapter_config.json")
MANIFEST = "manifest.json"
SHARDED_WEIGHTS = "sharded_weights.json"
"""File in a checkpoint's model if weights are sharded: the group of each weight, and its name in the group."""

MAX_LABELS = 10_000
"""Maximum number of labels: transformers would fill the memory with the names of more."""

READ_FILES = r"\.(json|jinja|txt)$|^tokenizer\.model$|^(adapter_)?model(-\d+-of-\d+)?\.safetensors$"
"""Files in a model's folder that kedge or transformers reads."""


def check_source(source: str | Path) -> str:
    """Resolve a model to a folder or hub id; see `find_model`. For an adapter on a hub, it is the downloaded folder.

    Raises:
        ModelError: The source looks like a path but does not exist, is a folder without a config.json, with too many
            labels or with git-lfs pointers, a run without such a model, or a name that is invalid on the hub or cannot
            be looked up.
    """
    source = find_model(source)
    path = Path(source)
    folder = os.path.expanduser(source)
    looks_like_path = path.is_absolute() or str(source).startswith((".", "~")) or len(path.parts) > 2
    if os.path.isfile(folder):
        raise ModelError(
            f"model {str(source)!r} is a file; expected its folder, which has config.json, or a name in .gguf"
        )
    if looks_like_path and not os.path.isdir(folder):
        raise ModelError(
            f"model {str(source)!r}: no such folder; expected a folder with config.json or a hub id (org/name)"
        )
    if os.path.isfile(os.path.join(folder, ADAPTER_CONFIG)) and has_whole_weights(folder):
        raise two_models(str(source))
    if os.path.isdir(folder) and not is_adapter(folder) and not os.path.isfile(os.path.join(folder, "config.json")):
        gguf = next(iter(sorted(Path(folder).glob("*.gguf"))), None)
        expected = "expected a folder saved by save_pretrained()" if gguf is None else f"name the file: {gguf}"
        raise ModelError(f"model folder {str(source)!r} has no config.json; {expected}")
    if os.path.isdir(folder):
        _check_pointers(Path(folder))
        _check_labels(folder)
        return folder
    if (fault := hub_fault(str(source), "model")) is not None:
        raise ModelError(f"model {str(source)!r}: no such folder; {fault}")
    return adapter_snapshot(str(source)) or str(source)


def _check_pointers(folder: Path) -> None:
    """Reject git-lfs pointers among the files to be read; other files of a clone may remain pointers."""
    unused = "tokenizer.model" if (folder / "tokenizer.json").is_file() else ""
    for file in sorted(folder.glob("*")):
        if re.search(READ_FILES, file.name) and file.name != unused and (fault := pointer_fault(file)) is not None:
            raise ModelError(fault)


def _check_labels(folder: str) -> None:
    """Reject a model with more labels than `MAX_LABELS`."""
    try:
        count = json.loads(Path(folder, "config.json").read_bytes()).get("num_labels")
    except (OSError, ValueError, AttributeError, RecursionError):  # reported when the model is loaded
        return
    if isinstance(count, (int, float)) and count > MAX_LABELS:
        raise ModelError(f"model {folder!r}: config.json has {count:,} labels; at most {MAX_LABELS:,} are supported")


def find_adapter(source: str | Path) -> AdapterFolder | None:
    """Return the adapter that a model's name refers to; None for a full model.

    Raises:
        ModelError: See `check_source` and `read_adapter`.
    """
    name = check_source(source)
    return read_adapter(name) if is_adapter(name) else None


def base_source(source: str | Path) -> str:
    """Return a model's folder or hub id; for an adapter, its base's.

    Raises:
        ModelError: See `check_source` and `read_adapter`.
    """
    adapter = find_adapter(source)
    return check_source(source if adapter is None else adapter.base)


def local_folder(source: str) -> Path | None:
    """Return the folder of a model, or of the downloaded files of a hub id; None if not downloaded."""
    config = (
        str(Path(source) / "config.json") if os.path.isdir(source) else try_to_load_from_cache(source, "config.json")
    )
    return Path(config).parent if isinstance(config, str) else None


def find_model(source: str | Path, *, in_shards: bool = False) -> str:
    """Return the folder or hub id that a model's name refers to. A folder with exactly this name has priority.

    Args:
        source: The name.
        in_shards: Accept a checkpoint with sharded weights.

    Raises:
        ModelError: The run does not exist, or has no such checkpoint or no model; the line lists the checkpoints. Or
            the weights are sharded, or a GGUF file cannot be read.
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
    if (file := find_gguf(str(source))) is not None:
        return gguf_folder(file, str(source))
    run, at, which = str(source).rpartition("@")
    if not at or os.path.isfile(folder):
        return str(source)
    if not is_run(Path(run)):  # no hub id contains @, so this must be a run's
        raise ModelError(f"model {str(source)!r}: {run!r} is not the folder of a run")
    return str(_checkpoint(Path(os.path.expanduser(run)), which, str(source)) / MODEL_FOLDER)


def _is_model(folder: Path) -> bool:
    """True if a folder has a model or an adapter."""
    return any(os.path.isfile(folder / name) for name in CONFIGS)


def _inside(folder: Path, source: str) -> Path:
    """Return the folder of a run's or checkpoint's model; any other folder is returned unchanged."""
    model = folder / MODEL_FOLDER
    if _is_model(model):
        return model
    if is_run(folder):
        stage = run_stage(folder)
        raise ModelError(
            f"model {source!r}: the run{f' of kedge {stage.name}' if stage else ''} has no model; {_kept(folder)}"
        )
    if os.path.isfile(folder / MANIFEST):
        raise ModelError(f"model {source!r}: the checkpoint {folder.name} has no model")
    return folder


def _checkpoint(run: Path, which: str, source: str) -> Path:
    best = best_checkpoint(run)
    if which == "best" and best is None:
        raise ModelError(f"model {source!r}: the run kept no best checkpoint; {_kept(run)}")
    if which != "best" and not which.isdecimal():
        raise ModelError(f"model {source!r}: @ is followed by the number of an update, or by best; {_kept(run)}")
    update = best if which == "best" else int(which)
    if update not in kept_checkpoints(run):
        raise ModelError(f"model {source!r}: the run has no checkpoint of update {which}; {_kept(run)}")
    folder = checkpoint_folder(run, update)
    if not _is_model(folder / MODEL_FOLDER):
        raise ModelError(f"model {source!r}: the checkpoint {folder.name} has no model")
    return folder


def _kept(run: Path) -> str:
    """List the run's checkpoints, for a message."""
    best = best_checkpoint(run)
    updates = [f"{update}{' (best)' * (update == best)}" for update in kept_checkpoints(run)]
    return f"it has checkpoints of updates {', '.join(updates)}" if updates else "it has no checkpoints"
