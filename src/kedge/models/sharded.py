"""Shards the weights of policy, critic, reference and reward models over the ranks."""

from __future__ import annotations

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from kedge.models.first_rank import give_tensors, inner_weights, take_out
from kedge.models.frozen import factors_of
from kedge.models.language import LanguageModel, output_layer
from kedge.models.packing.rows import TokenRows
from kedge.models.packing.trunk import Trunk
from kedge.models.precision import Precision, autocast
from kedge.models.scalar import ScalarModel
from kedge.ranks import Ranks
from kedge.ranks.sharding import fill_parts, shard, shard_weight
from kedge_base.errors import ModelError


def can_be_sharded(model: LanguageModel | ScalarModel) -> bool:
    """True if every forward pass calls the model's trunk exactly once.

    Sharding needs this because all ranks must run each pass together.
    """
    return model.trunk is not None and model.trunk.takes_one_pass


def shard_model(
    model: LanguageModel | ScalarModel, ranks: Ranks, precision: Precision = "fp32", *, offload: bool = False
) -> None:
    """Shard the weights of a model's trunk over the ranks, in place; does nothing for ranks that replicate models.

    The first rank's weights are used.

    A tied embedding and the heads are not sharded, since they are read outside the trunk's passes. An untied output
    layer is sharded separately and gathered once per pass, because ranks compute logits in different numbers of chunks.

    With products in bf16, layers are gathered in bf16: autocast would round the same matrices in every pass. Weights
    used in fp32, such as normalization, are then also not sharded, since FSDP gathers a layer in one number format.

    Args:
        model: The model.
        ranks: The ranks.
        precision: Number format of the run's matrix products.
        offload: Keep the shards in host memory; each layer is copied to the device for its pass.

    Raises:
        ModelError: Passes through the model call its trunk several times, or PyTorch is too old.
    """
    if not ranks.is_sharded:
        return
    trunk = _checked_trunk(model)
    if isinstance(model, LanguageModel):
        model.trunk.check_decoding()
    precision = "bf16" if model.holds_bf16 else precision
    layers = layers_of(trunk.model)
    factors = factors_of(trunk.model)
    parts = inner_weights(model, trunk.model)
    if precision == "bf16":
        vectors = [each for each in parts if each.ndim < 2 and each not in factors]
        give_tensors(trunk.model, vectors, device=model.device)
        parts = [each for each in parts if each.ndim >= 2 or each in factors]
    rounded = [layer for layer in layers if factors.issuperset({*layer.parameters()} & {*parts})]
    whole = take_out(trunk.model, parts)
    kept = [each for each in trunk.model.parameters() if not each.is_meta]
    shard(
        trunk.model,
        layers,
        ranks,
        device=model.device,
        kept=kept,
        in_bf16=rounded if precision == "bf16" else [],
        offload=offload,
    )
    fill_parts(trunk.model, whole, device=model.device, offload=offload)
    if isinstance(model, LanguageModel):
        layer = output_layer(model.causal)
        if type(layer) is nn.Linear and not {layer.weight} & {*trunk.model.parameters()}:
            shard_weight(layer, "weight", ranks, device=model.device)
    with torch.no_grad(), autocast(precision, model.device):
        trunk.hidden(TokenRows.of([[0]], model.device))  # the first pass settles which module is the outermost


def _checked_trunk(model: LanguageModel | ScalarModel) -> Trunk:
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7):
        raise ModelError(
            f"runtime.parallel=shard needs PyTorch 2.7 or newer, this is {torch.__version__}; use replicate"
        )
    if model.trunk is None or not model.trunk.takes_one_pass:
        name = type(model.causal if isinstance(model, LanguageModel) else model.classifier).__name__
        raise ModelError(f"runtime.parallel=shard does not work with {name}, whose rows are not packed; use replicate")
    return model.trunk


def layers_of(trunk: nn.Module) -> list[nn.Module]:
    """The transformer's layers; if layers are nested, only the outer ones."""
    layers = [module for module in trunk.modules() if isinstance(module, GradientCheckpointingLayer)]
    inside = {inner for layer in layers for inner in layer.modules() if inner is not layer}
    return [layer for layer in layers if layer not in inside]
