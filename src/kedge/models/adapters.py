"""Adapters in PEFT's format: a folder with a few weights of its own, on top of a base model that it names.

    adapter/
        adapter_config.json           kind, rank, targets, and the base: a folder or hub id
        adapter_model.safetensors     the adapter's weights, and whole modules such as the head of a reward model

Where a model is named, such a folder stands for its base with the adapter merged into the weights.

Source: Hu et al. 2021, "LoRA" (arXiv 2106.09685); https://huggingface.co/docs/peft.
"""

from __future__ import annotations

import copy
import json
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from kedge.errors import ConfigError, ModelError

__all__ = [
    "ADAPTER_CONFIG",
    "Adapter",
    "AdapterFolder",
    "AdapterSettings",
    "is_adapter",
    "is_frozen",
    "mark_frozen",
    "merge_adapter",
    "read_adapter",
]

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TRAINED, REFERENCE = "trained", "reference"
"""The names of the adapters in a model."""
PREFIX = "base_model.model."
"""Before the name of a weight in an adapter's file."""


@dataclass(frozen=True)
class AdapterSettings:
    """A new adapter.

    Attributes:
        kind: LoRA, or DoRA.
        rank: Of each matrix.
        alpha: Scale: the product is multiplied by alpha / rank, with `rslora` by alpha / √rank.
        target_modules: Names of layers; `auto` for every linear layer but the output layer.
        rslora: See `alpha`.
    """

    kind: Literal["lora", "dora"] = "lora"
    rank: int = 16
    alpha: float = 32.0
    target_modules: str | Sequence[str] = "auto"
    rslora: bool = False


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
        if os.path.isabs(os.path.expanduser(self.base)) and not os.path.isdir(os.path.expanduser(self.base)):
            raise ModelError(
                f"{folder}: its base {named!r} is not there; set base_model_name_or_path in its {ADAPTER_CONFIG}"
            )
        if is_adapter(os.path.expanduser(self.base)):
            raise ModelError(f"{folder}: its base {named!r} is an adapter, too; merge that first: kedge merge {named}")

    @property
    def generation_config(self) -> GenerationConfig | None:
        """Its defaults of `generate`; None for those of its base."""
        if not (self.folder / "generation_config.json").is_file():
            return None
        try:
            return GenerationConfig.from_pretrained(str(self.folder))
        except Exception as error:  # untrusted files: transformers raises whatever its parts do
            raise ModelError(f"{self.folder}: generation_config.json cannot be used: {_reason(error)}") from error

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


class Adapter:
    """An adapter that is trained, in the layers of its base, whose weights are frozen.

    The base also serves as the reference of PPO: without an adapter, or with a frozen copy of the one that the training
    started from.

    Args:
        model: The base, whose layers are replaced by ones with an adapter.
        settings: The new adapter; ignored where one is trained further.
        base: Name of the base, which the saved adapter names.
        start: The adapter to train further; None starts with one that changes nothing.
        has_reference: Whether a copy of `start` is kept as the reference.

    Raises:
        ConfigError: PEFT is not installed.
        ModelError: The model has no such layers, or the adapter does not belong to it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        settings: AdapterSettings,
        *,
        base: str,
        start: AdapterFolder | None = None,
        has_reference: bool = False,
    ) -> None:
        peft = _peft()
        self._model, self._peft = model, peft
        self._reference: str | None = REFERENCE if start is not None and has_reference else None
        if start is None:
            targets = settings.target_modules
            config = peft.LoraConfig(
                r=settings.rank,
                lora_alpha=settings.alpha,
                target_modules="all-linear" if targets == "auto" else targets,
                use_rslora=settings.rslora,
                use_dora=settings.kind == "dora",
                lora_dropout=0.0,  # it would make two passes differ, so that ratios are not 1 before the first step
                bias="none",
                task_type="CAUSAL_LM",
            )
        else:
            config = peft.LoraConfig.from_pretrained(str(start.folder))
            config.lora_dropout, config.inference_mode = 0.0, False
            if config.modules_to_save or config.bias != "none":
                raise ModelError(
                    f"{start.folder}: it has whole modules or biases, and kedge trains LoRA's matrices only; "
                    "merge it (kedge merge), and start from the whole model"
                )
        config.base_model_name_or_path = os.path.abspath(base) if os.path.isdir(base) else base
        try:
            for name in (TRAINED, self._reference):
                if name is not None:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")  # about a second adapter
                        peft.inject_adapter_in_model(copy.deepcopy(config), model, adapter_name=name)
                    if start is not None:
                        self._load(start, name)
        except (ValueError, TypeError, RuntimeError, KeyError) as error:
            wanted = start.folder if start else f"adapter.target_modules={settings.target_modules}"
            raise ModelError(f"{wanted}: {_reason(error)}") from error
        if not isinstance(model.get_output_embeddings(), nn.Linear):
            raise ModelError(
                "adapter.target_modules has the output layer, which cannot have an adapter; use auto, or others"
            )
        kind = peft.tuners.tuners_utils.BaseTunerLayer
        self._layers = [module for module in model.modules() if isinstance(module, kind)]
        model.requires_grad_(False)
        self._show(TRAINED)
        trained = set(self.weights().values())
        for weight in model.parameters():
            weight.requires_grad_(weight in trained)
            if weight not in trained:
                mark_frozen(weight)

    def weights(self) -> dict[str, nn.Parameter]:
        """The trained weights, by their names in the model."""
        part = f".{TRAINED}"
        return {name: each for name, each in self._model.named_parameters() if ".lora_" in name and part in name}

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        """Context in which the model is the reference; without gradients."""
        flags = [(weight, weight.requires_grad) for weight in self.weights().values()]
        self._show(self._reference)
        try:
            yield
        finally:
            self._show(TRAINED)
            for weight, requires_grad in flags:  # PEFT sets them when it switches
                weight.requires_grad_(requires_grad)

    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """The weights of the whole model by their names in the base, with the adapter's added; not for DoRA."""
        for name, tensor in self._model.state_dict().items():
            if ".lora_" in name:
                continue
            layer, inner, _ = name.partition(".base_layer.weight")
            if inner:
                tensor = tensor + cast(Any, self._model.get_submodule(layer)).get_delta_weight(TRAINED)
            yield name.replace(".base_layer", ""), tensor

    def save(self, folder: Path, *, weights: bool = True) -> None:
        """Write the adapter in PEFT's format.

        Args:
            folder: An existing folder.
            weights: False for everything else.
        """
        config = copy.deepcopy(self._model.peft_config[TRAINED])  # pyright: ignore[reportAttributeAccessIssue]
        config.inference_mode = True
        config.save_pretrained(str(folder))
        if weights:
            found = self._peft.get_peft_model_state_dict(self._model, adapter_name=TRAINED, save_embedding_layers=False)
            named = {f"{PREFIX}{name}": tensor.detach().cpu().contiguous() for name, tensor in found.items()}
            save_file(named, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})

    def _load(self, start: AdapterFolder, name: str) -> None:
        weights = _tensors(start.folder / ADAPTER_WEIGHTS)
        known = self._peft.get_peft_model_state_dict(self._model, adapter_name=name, save_embedding_layers=False)
        _check_names(start, set(weights), {f"{PREFIX}{each}" for each in known})
        stripped = {each.removeprefix(PREFIX): tensor for each, tensor in weights.items()}
        self._peft.set_peft_model_state_dict(self._model, stripped, adapter_name=name)

    def _show(self, name: str | None) -> None:
        """Let the layers compute with an adapter, or without."""
        for layer in cast(list[Any], self._layers):
            layer.enable_adapters(name is not None)
            if name is not None:
                layer.set_adapter(name)


def mark_frozen(weight: Tensor) -> None:
    """Say that a weight never changes, so that checkpoints leave it out."""
    weight.is_frozen = True  # pyright: ignore[reportAttributeAccessIssue]


def is_frozen(weight: Tensor) -> bool:
    """Whether a weight was marked; `requires_grad` alone can be off for a while."""
    return getattr(weight, "is_frozen", False)


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
    _check_names(adapter, saved, set(known))
    merged = adapted.merge_and_unload(safe_merge=False)
    if broken := next((name for name, weight in merged.named_parameters() if not weight.isfinite().all()), None):
        raise ModelError(f"{adapter.folder}: the weights contain NaN or infinity; first: {broken}")
    whole = {name.removeprefix(PREFIX) for name in saved if ".lora_" not in name}
    return merged.requires_grad_(True), whole


def _check_names(adapter: AdapterFolder, saved: set[str], known: set[str]) -> None:
    for name in sorted(saved ^ known):
        where = "the adapter's file" if name in known else f"the base {adapter.base!r}"
        raise ModelError(f"{adapter.folder}: {name} is missing in {where}; the adapter belongs to another model")


def _tensors(path: Path) -> dict[str, Tensor]:
    """The weights in a file."""
    try:
        weights = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if broken := next((name for name, weight in weights.items() if not weight.isfinite().all()), None):
        raise ModelError(f"{path}: the weights contain NaN or infinity; first: {broken}")
    return weights


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
