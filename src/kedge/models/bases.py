"""Models on one base: they share its weights in memory, and differ in adapters and heads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from kedge.models.adapters.frozen_weights import shared_copy
from kedge.models.first_rank import Loaded, built_without_weights
from kedge.models.pretrained import (
    check_source,
    disable_dropout,
    fit_embedding,
    fuse_activations,
    load_config,
    load_pretrained,
    quiet_transformers,
)

__all__ = ["Bases"]


class Bases:
    """The bases of a run's adapters, each in memory once.

    Every role gets modules of its own, whose weights are the base's. In them it has its adapter; so roles need no
    turns: one can sample while another is trained, and activations can be recomputed at any time.

    Args:
        trust_remote_code: Run Python code from a model's folder.
        on_host: Load and check the models in the host's memory. For bases that are then rounded: whole, they may not
            fit on the device. `hold_bases` rounds them there, and the run moves the rest.
    """

    def __init__(self, *, trust_remote_code: bool = False, on_host: bool = False) -> None:
        self._trusted, self._on_host = trust_remote_code, on_host
        self._loaded: dict[str, Loaded] = {}

    def place(self, device: str | torch.device) -> torch.device:
        """Where a model for this device is loaded and checked."""
        return torch.device("cpu" if self._on_host else device)

    def load(
        self,
        auto_class: Any,
        source: str | Path,
        tokenizer: PreTrainedTokenizerBase,
        device: torch.device,
        **settings: Any,
    ) -> Loaded:
        """A model on a base, and the names of its weights that the base has not.

        Args:
            auto_class: An `AutoModel…` class of transformers.
            source: The base: a folder or hub id.
            tokenizer: Its tokenizer.
            device: The device of the weights.
            settings: Passed to `from_pretrained`.

        Raises:
            ModelError: See `load_pretrained` and `fit_embedding`.
        """
        name = check_source(source)
        key = os.path.realpath(name) if os.path.isdir(name) else name
        config = load_config(name, trust_remote_code=self._trusted)
        if key not in self._loaded:
            own_class = AutoModelForCausalLM if _is_language_model(config) else auto_class
            own_settings = {} if own_class is not auto_class else settings
            loaded = load_pretrained(own_class, name, trust_remote_code=self._trusted, **own_settings)
            nn.Module.to(loaded.model, device)
            fit_embedding(loaded.model, tokenizer)
            # Never trained: a role has trainable weights in its adapter and its head alone.
            self._loaded[key] = Loaded(loaded.model.requires_grad_(False), loaded.missing)
        known = self._loaded[key]
        base = shared_copy(known.model)
        other = self._without_weights(auto_class, name, **settings)
        if other is None or type(other) is type(base):
            return Loaded(base, known.missing)
        grafted = _on_trunk_of(base, other)
        return grafted or load_pretrained(auto_class, name, trust_remote_code=self._trusted, **settings)

    @property
    def models(self) -> list[PreTrainedModel]:
        """The bases."""
        return [each.model for each in self._loaded.values()]

    def _without_weights(self, auto_class: Any, name: str, **settings: Any) -> PreTrainedModel | None:
        """The model as its class builds it; None if its code needs weights for that."""
        with quiet_transformers():
            config = AutoConfig.from_pretrained(name, trust_remote_code=self._trusted, **settings)
            return built_without_weights(
                lambda: auto_class.from_config(config, dtype=torch.float32, trust_remote_code=self._trusted)
            )


def _is_language_model(config: PreTrainedConfig) -> bool:
    """Whether a model was saved as a causal language model, so that it can serve a policy as well as a critic."""
    known = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return getattr(known, "__name__", None) in (config.architectures or ())


def _on_trunk_of(base: PreTrainedModel, other: PreTrainedModel) -> Loaded | None:
    """A model of another class on the trunk of a base; None if their trunks differ.

    Args:
        base: The base.
        other: The model, without weights. Those beyond the trunk are missing, and get some numbers.
    """
    trunk, place = base.base_model, other.base_model_prefix
    if type(trunk) is not type(other.base_model) or trunk is base or other.base_model is other:
        return None
    setattr(other, place, trunk)
    missing = {name for name, weight in other.named_parameters() if weight.is_meta}
    if any(buffer.is_meta for buffer in other.buffers()):
        return None
    for part in other.modules():
        for name, weight in list(part.named_parameters(recurse=False)):
            if weight.is_meta:
                part.register_parameter(name, nn.Parameter(_numbers(weight.shape).to(base.device)))
    disable_dropout(other)
    fuse_activations(other)
    return Loaded(other, missing)


def _numbers(shape: torch.Size) -> torch.Tensor:
    """Numbers with which a head can be checked, without drawing from the generator that new heads start from."""
    return 0.1 * torch.arange(1.0, shape.numel() + 1).cos().view(shape)
