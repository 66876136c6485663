"""Merging: the whole model that an adapter and its base make, or the shards of a checkpoint."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from kedge.errors import ModelError
from kedge.models.adapters import is_adapter, read_adapter
from kedge.models.pretrained import fit_embedding, load_pretrained, quiet_transformers
from kedge.models.run_models import SHARDED_WEIGHTS, find_model
from kedge.models.saving import VALUE_HEAD_FILE, save_model, value_head_file, write_whole
from kedge.models.shards import merge_shards
from kedge.models.tokenizers import load_tokenizer, save_tokenizer
from kedge.system.output import check_output

__all__ = ["merge"]


def merge(source: str | Path, out: str | os.PathLike[str], *, trust_remote_code: bool = False) -> Path:
    """Save an adapter and its base, or a checkpoint in shards, as one model; returns its folder.

    Args:
        source: The adapter: a folder that PEFT or kedge saved, or a run. Or a checkpoint whose weights are in shards.
        out: The new folder.
        trust_remote_code: Run Python code from the base's folder.

    Raises:
        ModelError: The source is neither, does not belong to its base, or is damaged.
        OutputError: The folder is not free, or cannot be written.
    """
    folder, target = Path(find_model(source, in_shards=True)), check_output(out)
    if os.path.isfile(folder / SHARDED_WEIGHTS):
        return merge_shards(folder, target, trust_remote_code=trust_remote_code)
    if not is_adapter(folder):
        raise ModelError(
            f"{str(source)!r} is not an adapter: it has no adapter_config.json, or a whole model beside it"
        )
    scalar = read_adapter(folder).is_scalar
    auto_class = AutoModelForSequenceClassification if scalar else AutoModelForCausalLM
    labels: dict[str, Any] = {"num_labels": 1} if scalar else {}
    model = load_pretrained(auto_class, folder, trust_remote_code=trust_remote_code, **labels).model
    tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code)
    fit_embedding(model, tokenizer)

    def write(part: Path) -> None:
        with quiet_transformers():
            save_model(model, part)
            save_tokenizer(tokenizer, part)
        if (head := value_head_file(folder)) is not None:
            (part / VALUE_HEAD_FILE).parent.mkdir()
            shutil.copyfile(head, part / VALUE_HEAD_FILE)

    return write_whole(target, write)
