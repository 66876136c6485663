"""Models whose weights have shapes and no contents, built from config.json alone: their passes cost no memory.

Every operation on them gives tensors of the right size and number format, so `LiveBytes` counts what the pass of the
real model would hold.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from kedge.algorithm.critic import Bins
from kedge.errors import ModelError
from kedge.models.adapters import Adapter, AdapterSettings
from kedge.models.frozen import BaseDtype, FrozenDtype, factors_of, hold_bases, quantize
from kedge.models.language import LanguageModel
from kedge.models.live_bytes import GROUPED_PRODUCT
from kedge.models.packing.packed import TokenRows, UnsupportedAttention
from kedge.models.packing.trunk import Precision
from kedge.models.pretrained import (
    disable_dropout,
    fuse_activations,
    load_config,
    loading_reason,
    num_embeddings,
    quiet_transformers,
)
from kedge.models.scalar import ScalarModel
from kedge.models.sources import base_source, find_adapter

__all__ = ["Blueprint", "freeze_hollow", "held_bytes", "hold_hollow_base", "hollow_models", "read_blueprint"]

NF4 = 1 / 2 + 1 / 64
"""Bytes of a number in nf4: 4 bits, and a scale of 8 bits for each 64."""
PER_KIND = ("layer_types", "mlp_layer_types", "layers_block_type")
"""Entries of config.json with one value per layer."""


@dataclass(frozen=True)
class Blueprint:
    """What a model is built from.

    Attributes:
        config: Its config.json.
        layers: Transformer blocks.
        alike: Whether all of them have the same shapes and the same kind, so that two or three stand for all.
        saved_bf16: Whether its weights were saved in bf16.
        base: The folder or hub id of its weights; of an adapter, that of its base.
        is_adapter: Whether it is one.
    """

    config: PreTrainedConfig
    layers: int
    alike: bool
    saved_bf16: bool
    base: str = ""
    is_adapter: bool = False

    def with_layers(self, layers: int) -> PreTrainedConfig:
        """The configuration with fewer layers, or all of them."""
        config = copy.deepcopy(self.config)
        text = config.get_text_config()
        text.num_hidden_layers = layers
        for name in PER_KIND:
            if isinstance(kinds := getattr(text, name, None), list) and len(kinds) == self.layers:
                setattr(text, name, kinds[:layers])
        return config


def read_blueprint(source: str | Path, *, trust_remote_code: bool = False) -> Blueprint:
    """Read a model's config.json; of an adapter, that of its base.

    Raises:
        ModelError: There is none, or transformers cannot use it.
    """
    base = base_source(source)
    config = load_config(base, trust_remote_code=trust_remote_code)
    text = config.get_text_config()
    kinds = [getattr(text, name, None) for name in PER_KIND]
    same = all(len(set(each)) == 1 for each in kinds if isinstance(each, list) and each)
    mixed = getattr(text, "first_k_dense_replace", 0) or (getattr(text, "decoder_sparse_step", 1) or 1) != 1
    saved = str(config.dtype).rpartition(".")[2]
    name = os.path.realpath(base) if os.path.isdir(base) else base
    alike, is_adapter = same and not mixed, find_adapter(source) is not None
    return Blueprint(config, int(text.num_hidden_layers), alike, saved == "bfloat16", name, is_adapter)


class _AllTokens:
    """A tokenizer whose tokens are all rows of the embedding."""

    pad_token_id = 0
    eos_token_id = 1

    def __init__(self, size: int) -> None:
        self._size = size

    def get_vocab(self) -> dict[str, int]:
        return _all_tokens(self._size)


@lru_cache(maxsize=2)
def _all_tokens(size: int) -> dict[str, int]:
    """The same for every model of a plan; large vocabularies take a tenth of a second."""
    return {str(token): token for token in range(size)}


@dataclass(frozen=True)
class HollowModels:
    """Builds models without contents.

    Attributes:
        mode: Makes tensors without contents.
    """

    mode: FakeTensorMode

    def language(
        self,
        config: PreTrainedConfig,
        *,
        value_head: bool = False,
        bins: Bins | None = None,
        adapter: AdapterSettings | None = None,
    ) -> LanguageModel:
        """A policy or reference; arguments as in `load_language_model`."""
        causal = self._build(AutoModelForCausalLM, config)
        model = LanguageModel(causal, _tokenizer(causal), value_head=value_head, bins=bins)
        _choose_packing(model)
        if adapter is not None:
            model.adapter = Adapter(causal, adapter, base="base")
        self.empty(model)
        return model

    def scalar(self, config: PreTrainedConfig, *, adapter: AdapterSettings | None = None) -> ScalarModel:
        """A critic or reward model; with an adapter that is trained if it is given."""
        config.num_labels = 1
        classifier = self._build(AutoModelForSequenceClassification, config)
        model = ScalarModel(classifier, _tokenizer(classifier))
        if model.trunk is not None:
            _choose_packing(model)
        if adapter is not None:
            model.adapter = Adapter(classifier, adapter, base="base")
        self.empty(model)
        return model

    def empty(self, model: nn.Module) -> None:
        """Replace weights that were added to a model with contents, such as a head's."""
        for module in model.modules():
            for name, weight in module._parameters.items():
                if weight is not None and not isinstance(weight, FakeTensor):
                    with self.mode:
                        hollow = torch.empty(weight.shape, dtype=weight.dtype)
                    module._parameters[name] = nn.Parameter(hollow, requires_grad=weight.requires_grad)

    def _build(self, auto_class: Any, config: PreTrainedConfig) -> PreTrainedModel:
        try:
            with quiet_transformers(), self.mode:
                model = auto_class.from_config(config, dtype=torch.float32)
        except Exception as error:  # the model's code may raise anything
            kind = type(config).__name__
            raise ModelError(f"{kind}: it cannot be planned without its weights: {loading_reason(error)}") from error
        disable_dropout(model)
        fuse_activations(model)
        return model


class _Hollow(FakeTensorMode):
    """Tensors without contents, also in products of experts in fp32.

    torch's rule for such a product without contents knows bf16 alone; its kernels take fp32 as well.
    """

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation."""
        if getattr(func, "_overloadpacket", func) is not GROUPED_PRODUCT or args[0].dtype == torch.bfloat16:
            return super().dispatch(func, types, args, kwargs)
        with self:
            product = func(args[0].bfloat16(), args[1].bfloat16(), *args[2:], **(kwargs or {}))
            return product.to(args[0].dtype)


@contextmanager
def hollow_models() -> Iterator[HollowModels]:
    """Within this context, models without contents can be built and run."""
    yield HollowModels(_Hollow(allow_non_fake_inputs=True))


def freeze_hollow(
    model: LanguageModel | ScalarModel, dtype: FrozenDtype, precision: Precision, *, saved_bf16: bool
) -> None:
    """Freeze a model and hold it as `hold_frozen` does; whether bf16 is exact is read off its config.json."""
    model.requires_grad_(False)
    if dtype == "fp32" or (dtype == "auto" and precision == "fp32"):
        return
    body = model.causal if isinstance(model, LanguageModel) else model.classifier.base_model
    if dtype == "int8" or dtype == "nf4":
        output = cast(PreTrainedModel, body).get_output_embeddings()
        # A pass holds one whole matrix at a time in both formats; see `held_bytes` for those of nf4.
        quantize(body, "int8", kept=[] if output is None else list(output.parameters()))
    tables = [module for module in body.modules() if isinstance(module, nn.Embedding)]
    held = factors_of(body, exactly=dtype == "auto")
    if dtype != "auto" or saved_bf16:
        held |= {module.weight for module in tables}
    else:
        held -= {module.weight for module in tables}
    for weight in held:
        if weight.dtype == torch.float32:
            weight.data = weight.data.bfloat16()
    for module in tables:
        if module.weight.dtype == torch.bfloat16:
            module.register_forward_hook(_in_fp32)
    model.holds_bf16 = True


def hold_hollow_base(model: LanguageModel | ScalarModel, dtype: BaseDtype, *, saved_bf16: bool) -> None:
    """Hold the base under a model's adapter as `hold_bases` does; see `freeze_hollow`."""
    if dtype == "auto":
        dtype = "bf16" if saved_bf16 else "fp32"
    hold_bases([model], "int8" if dtype == "nf4" else dtype)


def held_bytes(model: LanguageModel | ScalarModel, dtype: FrozenDtype) -> int:
    """Bytes of a frozen model's weights and buffers."""
    packed = sum(each.nbytes for name, each in model.named_parameters() if name.endswith(".packed"))
    whole = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
    return whole - round((1 - NF4) * packed) if dtype == "nf4" else whole


def _in_fp32(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output.float()


def _tokenizer(model: PreTrainedModel) -> PreTrainedTokenizerBase:
    return cast(PreTrainedTokenizerBase, _AllTokens(num_embeddings(model)))


def _choose_packing(model: LanguageModel | ScalarModel) -> None:
    """Pad the rows of a model whose attention cannot be packed; no numbers are needed to see that."""
    trunk = model.trunk
    assert trunk is not None
    try:
        with torch.no_grad():
            trunk.hidden(TokenRows(torch.ones(8, dtype=torch.long), (4, 4)))
    except UnsupportedAttention:
        trunk._packs = False


def layers_of(model: LanguageModel | ScalarModel) -> Sequence[nn.Module]:
    """The transformer blocks: the longest list of modules in the trunk."""
    assert model.trunk is not None
    lists = [module for module in model.trunk.model.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=len)) if lists else []
