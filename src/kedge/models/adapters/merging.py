"""Adds an adapter to the weights of its base."""

from __future__ import annotations

import warnings
from typing import Any, cast

from torch import Tensor
from transformers import PreTrainedModel

from kedge.models.adapters.folder import (
    PREFIX,
    AdapterFolder,
    check_names,
    check_shared,
    fill_lora,
    import_peft,
    lora_weights,
    under_present_names,
)
from kedge_base.errors import ModelError
from kedge_base.texts import error_text


def merge_adapter(model: PreTrainedModel, adapter: AdapterFolder) -> tuple[PreTrainedModel, set[str]]:
    """Merge an adapter into the weights of its base.

    Args:
        model: The base, which is modified.
        adapter: The adapter.

    Returns:
        The model, and the names of the weights that the adapter holds in full.

    Raises:
        ConfigError: PEFT is not installed.
        ModelError: The adapter does not belong to the model.
    """
    peft = import_peft()
    output = model.get_output_embeddings()
    if output is None:
        adapter = adapter.for_classifier()
    tied = output is not None and output.weight is model.get_input_embeddings().weight
    if tied and "lm_head" in (adapter.settings.get("modules_to_save") or ()):
        raise ModelError(
            f"{adapter.folder}: modules_to_save has lm_head, which PEFT trains apart from a tied embedding and loses "
            "when it merges; merge it with the library that made it, and use the whole model"
        )
    tables = {name for name, part in model.named_modules() if part in (output, model.get_input_embeddings())}
    places = {name.removeprefix(PREFIX).partition(".lora_")[0] for name in adapter.shapes}
    if any(".base_layer." in name and ".lora_" not in name for name in adapter.shapes) or (tied and places & tables):
        raise ModelError(
            f"{adapter.folder}: it has an adapter on the embedding or the output layer, which kedge does not merge; "
            "merge it by PEFT's merge_and_unload(), and use the whole model"
        )
    adapter.check(model)
    _grow_embeddings(model, adapter)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT's warnings are about missing weights, which are refused below
            adapted = peft.PeftModel.from_pretrained(model, str(adapter.folder), config=_config(adapter))
        present = lora_weights(adapted)
    except Exception as error:  # untrusted files: PEFT lets any error through
        raise ModelError(f"{adapter.folder}: {error_text(error)}; does it belong to {adapter.base!r}?") from error
    check_shared(str(adapter.folder), adapted)
    weights = {PREFIX + name: weight for name, weight in under_present_names(adapted, adapter.weights()).items()}
    held = set(weights)
    in_place = {
        name for name, _ in adapted.named_parameters(remove_duplicate=False)
    }  # weights that PEFT loads without a wrapper
    check_names(adapter, held, present.keys() | (held & in_place))
    # PEFT missed weights whose names it converted although the model knows them; see `under_present_names`.
    fill_lora(present, weights, adapter)
    try:
        merged = adapted.merge_and_unload(safe_merge=False)
    except Exception as error:  # some of PEFT's layers cannot be merged
        raise ModelError(f"{adapter.folder} cannot be merged into its base: {error_text(error)}") from error
    if broken := next((name for name, weight in merged.named_parameters() if not weight.isfinite().all()), None):
        raise ModelError(f"{adapter.folder}: the weights contain NaN or infinity; first: {broken}")
    return merged.requires_grad_(True), adapter.whole


def _config(adapter: AdapterFolder) -> Any:
    """PEFT's configuration for applying an adapter to any kind of model, with the full modules that its file contains.

    A policy's adapter can be put on a critic, and a reward model's needs no head if its base has one.
    """
    config = import_peft().LoraConfig.from_pretrained(str(adapter.folder))
    config.task_type = None
    owners = [name.rpartition(".")[0] for name in adapter.whole]
    config.modules_to_save = [
        each for each in config.modules_to_save or () if any(owner.endswith(each) for owner in owners)
    ]
    return config


def _grow_embeddings(model: PreTrainedModel, adapter: AdapterFolder) -> None:
    """Resize a base's embedding to that in the adapter's file, which PEFT writes if tokens were added."""
    layers = [model.get_input_embeddings(), model.get_output_embeddings()]
    tables = {id(layer.weight) for layer in layers if layer is not None}
    every = model.named_parameters(remove_duplicate=False)
    names = [name for name, weight in every if id(weight) in tables and name in adapter.whole]
    rows = {adapter.shapes[PREFIX + name][0] for name in names}
    if len(rows) == 1 and rows != {len(cast(Tensor, model.get_input_embeddings().weight))}:
        model.resize_token_embeddings(rows.pop(), mean_resizing=False)
