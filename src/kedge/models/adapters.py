"""Adapters in PEFT's format: a folder with a few weights of its own, on top of a base model that it names.

    adapter/
        adapter_config.json           kind, rank, targets, and the base: a folder or hub id
        adapter_model.safetensors     the adapter's weights, and whole modules such as the head of a reward model

Where a model is named, such a folder stands for its base with the adapter merged into the weights.

Source: Hu et al. 2021, "LoRA" (arXiv 2106.09685); https://huggingface.co/docs/peft.
"""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from kedge.errors import ConfigError, ModelError

__all__ = ["ADAPTER_CONFIG", "AdapterFolder", "is_adapter", "merge_adapter", "read_adapter"]

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Before the name of a weight in an adapter's file."""


class AdapterFolder:
    """A folder with an adapter.

    Attributes:
        folder: The folder.
        base: The model that the adapter belongs to: a folder or hub id.
        settings: The content of `adapter_config.json`.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder, self.settings = folder, settings
        named = str(settings["base_model_name_or_path"])
        beside = folder / os.path.expanduser(named)
        self.base = str(beside) if not os.path.isdir(os.path.expanduser(named)) and os.path.isdir(beside) else named
        if is_adapter(os.path.expanduser(self.base)):
            raise ModelError(f"{folder}: its base {named!r} is an adapter, too; merge that first: kedge merge {named}")

    @property
    def is_scalar(self) -> bool:
        """Whether it is the adapter of a sequence classifier, such as a reward model."""
        return self.settings.get("task_type") == "SEQ_CLS"


def is_adapter(folder: str | Path) -> bool:
    """Whether a folder has an adapter and no model."""
    return os.path.isfile(Path(folder) / ADAPTER_CONFIG) and not os.path.isfile(Path(folder) / "config.json")


def read_adapter(folder: str | Path) -> AdapterFolder:
    """Read what an adapter is, without its weights.

    Raises:
        ModelError: The file is damaged, names no base, or the adapter is of a kind that kedge does not support.
    """
    path = Path(folder) / ADAPTER_CONFIG
    try:
        settings = json.loads(path.read_bytes())
        kind, base = settings["peft_type"], settings["base_model_name_or_path"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read; expected a folder saved by PEFT's save_pretrained()") from error
    if kind != "LORA":
        raise ModelError(f"{path}: peft_type is {str(kind)[:40]!r}; kedge supports LORA (also with DoRA or rsLoRA)")
    if not isinstance(base, str) or not base:
        raise ModelError(f"{path}: base_model_name_or_path is missing; set it to the adapter's base model")
    if "lm_head" in (settings.get("modules_to_save") or ()) and not settings.get("ensure_weight_tying"):
        raise ModelError(
            f"{path}: modules_to_save has lm_head, which PEFT trains apart from a tied embedding and loses when it "
            "merges; merge it with the library that made it, and use the whole model"
        )
    if not (path.parent / ADAPTER_WEIGHTS).is_file():
        raise ModelError(f"{path.parent} has no {ADAPTER_WEIGHTS}; save the adapter with safe_serialization=True")
    return AdapterFolder(path.parent, settings)


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
    peft = _peft()
    saved = _names(adapter.folder / ADAPTER_WEIGHTS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about missing weights, which are refused below
            adapted = peft.PeftModel.from_pretrained(model, str(adapter.folder))
        known = peft.get_peft_model_state_dict(adapted, save_embedding_layers=False).keys()
    except Exception as error:  # untrusted files: PEFT raises whatever its parts do
        raise ModelError(f"{adapter.folder}: {_reason(error)}; does it belong to {adapter.base!r}?") from error
    for name in sorted(saved ^ known):
        where = "the adapter's file" if name in known else f"the base {adapter.base!r}"
        raise ModelError(f"{adapter.folder}: {name} is missing in {where}; the adapter belongs to another model")
    merged = adapted.merge_and_unload(safe_merge=False)
    if broken := next((name for name, weight in merged.named_parameters() if not weight.isfinite().all()), None):
        raise ModelError(f"{adapter.folder}: the weights contain NaN or infinity; first: {broken}")
    whole = {name.removeprefix(PREFIX) for name in saved if ".lora_" not in name}
    return merged.requires_grad_(True), whole


def _names(path: Path) -> set[str]:
    """The names of the weights in a file."""
    try:
        with safe_open(path, framework="pt") as file:
            return set(file.keys())
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _peft() -> Any:
    """PEFT, which takes seconds to import."""
    try:
        import peft  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(f"adapters need PEFT: pip install 'kedge[adapters]' ({error})") from error
    return peft
