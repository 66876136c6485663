"""Builds the architectures that transformers knows: tiny, with random weights far from their start."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from tests.models.registry.particular import OVERRIDES, VARIANTS
from tests.models.registry.sizes import HEADS, LAYERS, SIZES
from tests.models.registry.tokenizer import word_tokenizer

MATRIX_STD, VECTOR_STD = 0.3, 0.2


def save_policy_folder(architecture: str, folder: Path) -> PreTrainedModel:
    """Save a causal language model with its tokenizer; return it as plain transformers loads it, without dropout."""
    config = tiny_config(architecture)
    if hasattr(config, "is_decoder") and architecture not in VARIANTS:
        config.is_decoder = True  # BERT and its relatives read in both directions otherwise
    return _save(AutoModelForCausalLM, config, folder)


def save_reward_folder(architecture: str, folder: Path) -> PreTrainedModel:
    """The same for a classifier with one label."""
    config = tiny_config(architecture)
    for part in (config, config.get_text_config()):
        part.num_labels = 1
    return _save(AutoModelForSequenceClassification, config, folder)


def _save(auto_class: Any, config: PreTrainedConfig, folder: Path) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = stir(auto_class.from_config(config))
    model.save_pretrained(folder)
    if type(model.config) not in auto_class._model_mapping:  # the text part of a model with images
        config.save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return auto_class.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def stir(model: PreTrainedModel) -> PreTrainedModel:
    """Enlarge and perturb the weights, so that a wrong mask, position or row changes the outputs by much.

    Matrices are scaled, not redrawn, because some start with a structure that the layer needs.
    """
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if weight.ndim < 2:
            weight.add_(VECTOR_STD * noise)
        elif (spread := float(weight.std())) < 1e-6:
            weight.add_(MATRIX_STD * noise)
        elif spread < MATRIX_STD:
            weight.mul_(MATRIX_STD / spread)
    return model


def tiny_config(architecture: str) -> PreTrainedConfig:
    """The configuration of an architecture, or of a variant of one, with tiny sizes and every kind of its layers."""
    model_type, changes = VARIANTS.get(architecture, (architecture, {}))
    return _shrink(CONFIG_MAPPING[model_type], model_type, changes)


def _shrink(
    kind: type[PreTrainedConfig], model_type: str, changes: Mapping[str, Any] = MappingProxyType({})
) -> PreTrainedConfig:
    own = {name: value for name, value in vars(kind()).items() if not name.startswith("_")}
    sizes = {name: value for name, value in SIZES.items() if name in kind.__dataclass_fields__}
    if "kv_lora_rank" in own and "num_key_value_heads" in own:  # every head has its own keys
        sizes["num_key_value_heads"] = HEADS
    # Dropout is on, so that forgetting to turn it off shows.
    sizes |= {name: 0.1 for name, value in own.items() if "drop" in name and isinstance(value, float)}
    sizes |= _layer_lists(own)
    for name, part in own.items():
        if isinstance(part, PreTrainedConfig):
            sizes[name] = _shrink(type(part), part.model_type)
    return kind(**{**sizes, **OVERRIDES.get(model_type, {}), **changes})


def _layer_lists(own: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Settings with one entry per layer, cut to a few layers in which every combination occurs."""
    count = next((own[name] for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers") if name in own), 0)
    lists = {
        name: value
        for name, value in own.items()
        if isinstance(value, (list, tuple)) and len(value) == count > 1 and name not in SIZES
    }
    kinds = list(zip(*lists.values(), strict=True))
    first = [place for place, kind in enumerate(kinds) if kind not in kinds[:place]][:LAYERS]
    others = [place for place in range(len(kinds)) if place not in first]
    places = sorted([*first, *others[: LAYERS - len(first)]])
    return {name: [value[place] for place in places] for name, value in lists.items()}
