"""A whole model from a checkpoint whose weights are in one file per rank."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from kedge.errors import DataError, ModelError
from kedge.models.pretrained import load_config, quiet_transformers
from kedge.models.run_models import SHARDED_WEIGHTS
from kedge.models.saving import write_whole
from kedge.system.durable import copy_tree
from kedge.system.ranks.sharding import StoredTensors

__all__ = ["merge_shards"]


def merge_shards(folder: Path, target: Path, *, trust_remote_code: bool = False) -> Path:
    """Save the model of a checkpoint in shards as a whole one; returns its folder.

    Args:
        folder: The model's folder in the checkpoint.
        target: The new folder, which is free.
        trust_remote_code: Run Python code from the model's folder.

    Raises:
        ModelError: A file is missing or damaged.
        OutputError: The folder cannot be written.
    """
    config = load_config(str(folder), trust_remote_code=trust_remote_code)
    is_scalar = any("SequenceClassification" in name for name in config.architectures or ())
    auto_class = AutoModelForSequenceClassification if is_scalar else AutoModelForCausalLM
    with quiet_transformers():
        model = auto_class.from_config(config, dtype=torch.float32, trust_remote_code=trust_remote_code)
    try:
        _fill(model, folder)
    except ModelError:
        raise
    except (SafetensorError, OSError, ValueError, LookupError, TypeError, RuntimeError, DataError) as error:
        raise ModelError(f"model {str(folder)!r}: its shards cannot be read: {error}") from error

    def write(part: Path) -> None:
        model.save_pretrained(part)
        # Everything else as it was saved, such as the stop tokens in the generation's defaults.
        copy_tree(folder, part, leave_out=SHARDED_WEIGHTS)

    return write_whole(target, write)


@torch.no_grad()
def _fill(model: PreTrainedModel, folder: Path) -> None:
    """Give a model the weights in the shards, one after the other.

    Raises:
        ModelError: One is missing, or has another shape.
    """
    places = json.loads((folder / SHARDED_WEIGHTS).read_bytes())
    groups = {
        group: StoredTensors((path, None) for path in sorted((folder.parent / group).glob("shard-*.safetensors")))
        for group in {group for group, _ in places.values()}
    }
    own = model.state_dict(keep_vars=True)
    for name, weight in own.items():
        if name not in places:
            raise ModelError(f"model {str(folder)!r}: the shards have no {name}")
        group, stored = places[name]
        shape = groups[group].shape(stored)
        if shape != tuple(weight.shape):
            raise ModelError(f"model {str(folder)!r}: {name} is {list(shape)}, expected {list(weight.shape)}")
        weight.copy_(groups[group][stored])
