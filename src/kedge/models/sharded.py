"""Splits the weights of policy, critic, reference and reward models over the ranks."""

from __future__ import annotations

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from kedge.errors import ModelError
from kedge.models.first_rank import inner_weights, take_out
from kedge.models.language import LanguageModel
from kedge.models.packing.rows import TokenRows
from kedge.models.precision import autocast
from kedge.models.scalar import ScalarModel
from kedge.ranks import Ranks
from kedge.ranks.sharding import fill_parts, shard

__all__ = ["can_be_sharded", "shard_model"]


def can_be_sharded(model: LanguageModel | ScalarModel) -> bool:
    """Whether each pass calls the model's trunk exactly once, as passes in which all ranks take part must."""
    return model.trunk is not None and model.trunk.takes_one_pass


def shard_model(model: LanguageModel | ScalarModel, ranks: Ranks) -> None:
    """Split the weights of a model's trunk over the ranks, in place; nothing for ranks that hold all weights.

    Those of the first rank count.

    The output layer, a tied embedding and the heads stay whole: they are read outside the trunk's own passes.

    Raises:
        ModelError: Passes through the model call its trunk several times, or PyTorch is too old.
    """
    if not ranks.is_sharded:
        return
    trunk = model.trunk
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7):
        raise ModelError(
            f"runtime.parallel=shard needs PyTorch 2.7 or newer, this is {torch.__version__}; use replicate"
        )
    if trunk is None or not trunk.takes_one_pass:
        name = type(model.causal if isinstance(model, LanguageModel) else model.classifier).__name__
        raise ModelError(f"runtime.parallel=shard does not work with {name}, whose rows are not packed; use replicate")
    if isinstance(model, LanguageModel):
        model.check_sampling()
    parts = inner_weights(model, trunk.model)
    whole = take_out(trunk.model, parts)
    kept = [each for each in trunk.model.parameters() if not each.is_meta]
    shard(trunk.model, _layers(trunk.model), ranks, device=model.device, kept=kept)
    fill_parts(trunk.model, whole, device=model.device)
    with torch.no_grad(), autocast("bf16" if model.holds_bf16 else "fp32", model.device):
        trunk.hidden(TokenRows.of([[0]], model.device))  # the first pass settles which module is the outermost


def _layers(trunk: nn.Module) -> list[nn.Module]:
    """The transformer's layers; of nested ones, the outer ones."""
    layers = [module for module in trunk.modules() if isinstance(module, GradientCheckpointingLayer)]
    inside = {inner for layer in layers for inner in layer.modules() if inner is not layer}
    return [layer for layer in layers if layer not in inside]
