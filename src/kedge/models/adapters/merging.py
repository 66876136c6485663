"""Adds an adapter to the weights of its base."""

from __future__ import annotations

import warnings

from transformers import PreTrainedModel

from kedge.errors import ModelError
from kedge.models.adapters.folder import PREFIX, AdapterFolder, check_names, import_peft, reason_of, under_present_names

__all__ = ["merge_adapter"]


def merge_adapter(model: PreTrainedModel, adapter: AdapterFolder) -> tuple[PreTrainedModel, set[str]]:
    """Merge an adapter into the weights of its base.

    Args:
        model: The base, which is changed.
        adapter: The adapter.

    Returns:
        The model, and the names of the weights that the adapter holds whole.

    Raises:
        ConfigError: PEFT is not installed.
        ModelError: The adapter does not belong to the model.
    """
    peft = import_peft()
    output = model.get_output_embeddings()
    tied = output is not None and output.weight is model.get_input_embeddings().weight
    if tied and "lm_head" in (adapter.settings.get("modules_to_save") or ()):
        raise ModelError(
            f"{adapter.folder}: modules_to_save has lm_head, which PEFT trains apart from a tied embedding and loses "
            "when it merges; merge it with the library that made it, and use the whole model"
        )
    if any(".base_layer." in name and ".lora_" not in name for name in adapter.shapes):
        raise ModelError(
            f"{adapter.folder}: it has an adapter on the embedding or the output layer, which kedge does not merge; "
            "merge it by PEFT's merge_and_unload(), and use the whole model"
        )
    adapter.check(model)
    tables = _grow_embeddings(model, adapter)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about missing weights, which are refused below
            adapted = peft.PeftModel.from_pretrained(model, str(adapter.folder))
        known = peft.get_peft_model_state_dict(adapted, save_embedding_layers=False).keys()
    except Exception as error:  # untrusted files: PEFT raises whatever its parts do
        raise ModelError(f"{adapter.folder}: {reason_of(error)}; does it belong to {adapter.base!r}?") from error
    held = under_present_names(adapted, adapter.weights())
    check_names(adapter, [PREFIX + name for name in held], {*known, *(PREFIX + name for name in tables)})
    try:
        merged = adapted.merge_and_unload(safe_merge=False)
    except Exception as error:  # PEFT has layers that cannot be merged
        raise ModelError(f"{adapter.folder} cannot be merged into its base: {reason_of(error)}") from error
    if broken := next((name for name, weight in merged.named_parameters() if not weight.isfinite().all()), None):
        raise ModelError(f"{adapter.folder}: the weights contain NaN or infinity; first: {broken}")
    return merged.requires_grad_(True), adapter.whole


def _grow_embeddings(model: PreTrainedModel, adapter: AdapterFolder) -> list[str]:
    """Give a base the rows of the embedding in the adapter's file, which PEFT writes where tokens were added.

    Returns:
        The names of the embedding and of the output layer, those that are in the file.
    """
    layers = [model.get_input_embeddings(), model.get_output_embeddings()]
    tables = {id(layer.weight) for layer in layers if layer is not None}
    every = model.named_parameters(remove_duplicate=False)
    names = [name for name, weight in every if id(weight) in tables and name in adapter.whole]
    rows = {adapter.shapes[PREFIX + name][0] for name in names}
    if len(rows) == 1 and rows != {len(model.get_input_embeddings().weight)}:
        model.resize_token_embeddings(rows.pop(), mean_resizing=False)
    return names
