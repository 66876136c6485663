"""Weights of frozen roles in bf16, int8 or nf4: less memory for a reference, reward model, judge or opponent.

A product in bf16 rounds both of its factors. So where products run in bf16 anyway, a matrix that is held in bf16 gives
the same results, to the bit, as one that is held in fp32 and rounded in every pass. Normalization, heads and everything
else that is computed in fp32 keep fp32 weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from kedge.models.language import LanguageModel
from kedge.models.packing.trunk import Precision
from kedge.models.quantized import quantize
from kedge.models.scalar import ScalarModel
from kedge.system.ranks import ALONE, Ranks

__all__ = ["FrozenDtype", "HostWeights", "factors_of", "hold_frozen"]

FrozenDtype = Literal["auto", "fp32", "bf16", "int8", "nf4"]


@torch.no_grad()
def hold_frozen(
    model: LanguageModel | ScalarModel, dtype: FrozenDtype, precision: Precision, ranks: Ranks = ALONE
) -> None:
    """Freeze a model, and hold its weights in a number format, in place.

    auto: bf16 for what changes no result where products run in bf16: the matrices of linear layers, and embeddings
    whose numbers bf16 can represent (most published models are saved in bf16). Where products run in fp32, nothing.
    bf16: also all other embeddings, and the matrices of experts. The role's products then run in bf16.
    int8, nf4: as bf16, and linear layers in 8 or 4 bits; not the output layer, whose rounding reaches every logit.

    Args:
        model: It was checked, and nothing else shares its weights.
        dtype: The format.
        precision: Number format of the run's matrix products.
        ranks: If they shard their models, the first has the weights, and decides for all; not for int8 and nf4.

    Raises:
        ConfigError: nf4 cannot be had.
    """
    model.requires_grad_(False)
    if dtype == "fp32" or (dtype == "auto" and precision == "fp32"):
        return
    body = model.causal if isinstance(model, LanguageModel) else model.classifier.base_model
    if dtype == "int8" or dtype == "nf4":
        output = cast(PreTrainedModel, body).get_output_embeddings()
        quantize(body, dtype, kept=[] if output is None else list(output.parameters()))
    exactly = dtype == "auto"
    tables = [module for module in body.modules() if isinstance(module, nn.Embedding)]

    def fitting() -> list[bool]:
        return [not exactly or _loses_nothing(module) for module in tables]

    fit = ranks.first(fitting) if ranks.is_sharded else fitting()
    kept = {module.weight for module, fits in zip(tables, fit, strict=True) if not fits}
    for parameter in factors_of(body, exactly=exactly) | {module.weight for module in tables}:
        if parameter not in kept and parameter.dtype == torch.float32:
            parameter.data = parameter.data.bfloat16()
    for module in tables:
        if module.weight.dtype == torch.bfloat16:
            module.register_forward_hook(_in_fp32)
    model.holds_bf16 = True


def factors_of(body: nn.Module, *, exactly: bool = True) -> set[nn.Parameter]:
    """The weights that are read by matrix products alone, and the biases added to these.

    Args:
        body: A model or a part of it.
        exactly: Only those that autocast would round. Subclasses may read their weights in other ways, and grouped
            products of experts round no fp32 matrix.
    """
    layers = [
        module
        for module in body.modules()
        if (type(module) in (nn.Linear, Conv1D) if exactly else isinstance(module, nn.Linear | Conv1D))
    ]
    factors = {parameter for layer in layers for parameter in layer.parameters(recurse=False)}
    if not exactly:
        experts = [module for module in body.modules() if type(module).__name__.endswith("Experts")]
        factors |= {each for module in experts for each in module.parameters(recurse=False) if each.ndim == 3}
    return factors


def _loses_nothing(table: nn.Embedding) -> bool:
    """Whether bf16 can represent all numbers of an embedding, and its lookup is a plain one."""
    rows = table.weight.split(4096)
    return type(table) is nn.Embedding and all(torch.equal(part, part.bfloat16().float()) for part in rows)


def _in_fp32(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """A looked-up embedding in fp32, in which the layers' outputs are added to it."""
    return output.float()


class HostWeights:
    """Moves a frozen module's weights to the host's memory, and to its device for a while.

    Nothing is copied back: the weights do not change. Buffers, which are small, stay on the device.

    Args:
        module: The module.
        device: The device of its passes.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._weights = list(module.parameters())
        self._device = device
        # Scoring can run in two threads at a time; one must not take the weights away from the other.
        self._turn = RLock()
        pinned = device.type == "cuda"  # copied without a detour through other memory
        for weight in self._weights:
            weight.data = weight.data.cpu().pin_memory() if pinned else weight.data.cpu()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Within this context the weights are on the device."""
        with self._turn:
            here = [weight.data for weight in self._weights]
            try:
                for weight in self._weights:
                    weight.data = weight.data.to(self._device, non_blocking=True)
                yield
            finally:
                for weight, data in zip(self._weights, here, strict=True):
                    weight.data = data
