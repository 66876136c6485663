"""The number format of matrix products: fp32, or bf16 where the hardware is faster with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from kedge_base.machine.memory import free_memory

Precision = Literal["fp32", "bf16"]

MIN_CPU_WIDTH = 256
"""Hidden size below which casting to bf16 on a CPU costs more than the faster products save."""
ROOM_SHARE = 1 / 8
"""Share of the free memory that copies of frozen weights may take."""


def resolve_precision(
    precision: Precision | Literal["auto"], device: str | torch.device, *, width: int | None = None
) -> Precision:
    """Resolve `auto` to bf16 where the hardware supports it natively and the model is wide enough to gain, else fp32.

    Native support: CUDA from compute capability 8.0, and CPUs with AVX-512-BF16 or AMX. A narrow model (hidden size
    below 256) spends its time outside matrix products, so on a CPU it stays in fp32.

    Args:
        precision: `auto`, or the format itself.
        device: The models' device.
        width: The model's hidden size; None if unknown.
    """
    if precision != "auto":
        return precision
    kind = torch.device(device).type
    if kind == "cuda":
        return "bf16" if torch.cuda.get_device_capability(device)[0] >= 8 else "fp32"
    if kind == "cpu" and (width is None or width >= MIN_CPU_WIDTH):
        native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        return "bf16" if native else "fp32"
    return "fp32"


def autocast(precision: Precision, device: str | torch.device) -> AbstractContextManager[object]:
    """A context in which matrix products run in `precision`; fp32 turns autocast off."""
    return torch.autocast(torch.device(device).type, dtype=torch.bfloat16, enabled=precision == "bf16")


@contextmanager
def prepacked(model: nn.Module, precision: Precision) -> Iterator[None]:
    """Prepack the weights of linear layers within the block, in the order in which a CPU's kernels read them.

    Products of few rows, as in a sampling step, become a fifth to a half faster, because weights are not reordered for
    each of them. For trained weights, the copies replace those that autocast makes. Frozen weights are copied if there
    is plenty of memory; frozen bf16 weights, which need no other copy, only if no part of the model is trained, since
    such a run's memory was planned without these copies. Passes with gradients, or without autocast, use the original
    weights.

    Args:
        model: The model; only the rounding of its results changes.
        precision: Number format of the products; this only has an effect for bf16 on a CPU.
    """
    layers = []
    if precision == "bf16" and next(model.parameters()).device.type == "cpu" and _can_prepack():
        layers = [
            layer
            for layer in model.modules()
            if type(layer) is nn.Linear and type(layer.weight) is nn.Parameter and "forward" not in vars(layer)
        ]
        if any(weight.requires_grad for weight in model.parameters()):
            layers = [layer for layer in layers if layer.weight.dtype != torch.bfloat16]
        frozen = sum(layer.weight.numel() for layer in layers if not layer.weight.requires_grad)
        if frozen * torch.bfloat16.itemsize > ROOM_SHARE * free_memory():
            layers = [layer for layer in layers if layer.weight.requires_grad]
    try:
        for layer in layers:
            weight, bias = (None if each is None else each.detach().bfloat16() for each in (layer.weight, layer.bias))
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
            vars(layer)["forward"] = partial(_multiply, layer, layer.weight, packed, bias)
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


def _multiply(
    layer: nn.Linear, weight: Tensor, packed: Tensor, bias: Tensor | None, *inputs: Tensor, **named: Tensor
) -> Tensor:
    # Not prepacked: with gradients, in fp32 as in a trial of the model, or with an adapter instead of the weight.
    if torch.is_grad_enabled() or not torch.is_autocast_enabled("cpu") or layer.weight is not weight:
        return nn.Linear.forward(layer, *inputs, **named)
    [states] = (*inputs, *named.values())
    return torch.ops.mkldnn._linear_pointwise(states.bfloat16(), packed, bias, "none", [], "")


def _can_prepack() -> bool:
    """True if torch has oneDNN's linear layers, and they support bf16 on this processor."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
