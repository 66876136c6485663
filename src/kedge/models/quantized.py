"""Linear layers whose weights are held in 16, 8 or 4 bits.

bf16: every number is rounded to 8 significant bits. 2 bytes per weight.
int8: every row of a matrix has a scale, its largest number / 127. 1 byte per weight.
nf4:  every 64 numbers have a scale, which has 8 bits itself; a number is one of 16, dense around 0. 0.52 bytes.

A product reads the weights in the number format of its inputs: bf16 and int8 are exact in it, and int8 is scaled after
the product; nf4 is made whole for one product at a time. Gradients reach the inputs; the weights are fixed.

Source: int8, rows as in Dettmers et al. 2022 (arXiv 2208.07339), of weights only; nf4, Dettmers et al. 2023 (arXiv
2305.14314), by bitsandbytes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from functools import cache
from typing import Any, Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from kedge.errors import ConfigError, install_line
from kedge.models.adapters.frozen_weights import is_frozen, mark_frozen

__all__ = [
    "QUANTIZED",
    "BaseDtype",
    "QuantizedDtype",
    "QuantizedLinear",
    "hold_bases",
    "load_bitsandbytes",
    "matrix_of",
    "num_weights",
    "quantize",
]

QuantizedDtype = Literal["bf16", "int8", "nf4"]
BaseDtype = Literal["auto", "fp32", "bf16", "int8", "nf4"]
QUANTIZED: tuple[QuantizedDtype, ...] = ("int8", "nf4")

BLOCK, OUTER_BLOCK = 64, 256
"""Numbers per scale in nf4, and scales per scale of theirs: the choice of its paper."""

STANDS_FOR = "stands_for"
"""Attribute of a parameter that is not one weight per number: how many weights it stands for."""


def load_bitsandbytes(purpose: str, device: torch.device) -> Any:
    """Import bitsandbytes.

    Args:
        purpose: The setting that needs it, for the message.
        device: The device that it has to work on.

    Raises:
        ConfigError: It is not installed, or does not work there.
    """
    # It warns about a further library that would be faster in passes which training does not use.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    try:
        import bitsandbytes
    except ImportError as error:
        raise ConfigError(f"{purpose} needs bitsandbytes: {install_line('bitsandbytes')}") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"{purpose} runs on a CPU or an NVIDIA GPU, not on {device.type}")
    return bitsandbytes


class QuantizedLinear(nn.Module):
    """A linear layer that is not trained, in place of one.

    Args:
        layer: The layer; its bias is kept as it is.
        dtype: The number format.
        device: Where the weights are rounded and held; None for where they are.
    """

    packed: nn.Parameter
    scales: nn.Parameter
    """Not in bf16."""

    def __init__(self, layer: nn.Linear | Conv1D, dtype: QuantizedDtype, device: torch.device | None = None) -> None:
        super().__init__()
        weight = matrix_of(layer).detach().to(device)
        self.out_features, self.in_features = weight.shape
        self.dtype: QuantizedDtype = dtype
        self._is_transposed = isinstance(layer, Conv1D)
        self.bias = layer.bias
        # Parameters all of them, so that they move with the model.
        for name, tensor in _HELD[dtype](weight).items():
            parameter = nn.Parameter(tensor, requires_grad=False)
            setattr(parameter, STANDS_FOR, weight.numel() if name == "packed" else 0)
            self.register_parameter(name, parameter)

    @property
    def weight(self) -> Float[Tensor, "out_features in_features"]:
        """The matrix that the products are of, in fp32."""
        whole = self._whole(torch.float32)
        return whole * self.scales.float()[:, None] if self.dtype == "int8" else whole

    def saved_weight(self) -> Tensor:
        """The matrix as the layer that it replaced holds it."""
        return self.weight.T if self._is_transposed else self.weight

    def forward(self, inputs: Float[Tensor, "*rest in_features"]) -> Float[Tensor, "*rest out_features"]:
        """The product, in autocast's number format or that of the inputs."""
        kind = inputs.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else inputs.dtype
        return cast(Tensor, _Product.apply(inputs.to(dtype), self))

    def times(self, inputs: Float[Tensor, "*rest in_features"]) -> Float[Tensor, "*rest out_features"]:
        """The product: inputs · weightᵀ + bias."""
        whole, bias = self._whole(inputs.dtype), None if self.bias is None else self.bias.to(inputs.dtype)
        if self.dtype != "int8":
            return functional.linear(inputs, whole, bias)
        product = functional.linear(inputs, whole) * self.scales.to(inputs.dtype)
        return product if bias is None else product + bias

    def times_transposed(self, outputs: Float[Tensor, "*rest out_features"]) -> Float[Tensor, "*rest in_features"]:
        """The gradient of the inputs: outputs · weight."""
        scaled = outputs * self.scales.to(outputs.dtype) if self.dtype == "int8" else outputs
        return scaled @ self._whole(outputs.dtype)

    def _whole(self, dtype: torch.dtype) -> Tensor:
        """The matrix; in int8 up to the scales of its rows."""
        if self.dtype != "nf4":
            return self.packed.to(dtype)
        from bitsandbytes.functional import QuantState, dequantize_4bit, dequantize_blockwise

        outer, codes = self.get_parameter("outer_scales"), _codes(self.packed.device)
        scales = dequantize_blockwise(self.scales, absmax=outer, code=codes, blocksize=OUTER_BLOCK)
        scales += self.get_parameter("offset")
        shape = torch.Size((self.out_features, self.in_features))
        kept = QuantState(scales, shape=shape, blocksize=BLOCK, quant_type="nf4", dtype=dtype)
        return dequantize_4bit(self.packed, kept)


class _Product(torch.autograd.Function):
    """A product whose backward pass makes the weights whole again, in place of keeping them so."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, layer: QuantizedLinear) -> Tensor:
        """The product."""
        ctx.layer = layer
        return layer.times(inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """The gradient of the inputs."""
        return ctx.layer.times_transposed(gradients[0]), None


def quantize(body: nn.Module, dtype: QuantizedDtype, *, kept: Collection[nn.Parameter] = ()) -> int:
    """Replace the linear layers of a model by quantized ones, in place; return how many.

    Layers of a subclass, which may read their weights in other ways, stay, as do the stacked matrices of experts, and
    in nf4 rows of an odd length.

    Args:
        body: The model, checked before: it is probed with the weights that it came with.
        dtype: The number format.
        kept: Weights of layers that stay as they are.
    """
    replaced: dict[nn.Module, QuantizedLinear] = {}
    for parent, name, layer in _linear_layers(body, kept):
        if dtype == "nf4" and matrix_of(layer).shape[1] % 2:
            continue
        if layer not in replaced:  # a layer may have two names
            replaced[layer] = QuantizedLinear(layer, dtype)
        setattr(parent, name, replaced[layer])
    return len(replaced)


@torch.no_grad()
def hold_bases(models: Iterable[nn.Module], dtype: BaseDtype, device: torch.device | None = None) -> None:
    """Hold the matrices under adapters in a number format, in place; what models share, they share from then on, too.

    auto: bf16 for a matrix whose numbers bf16 can represent, as most published ones: products are the same, to the bit.
    bf16, int8, nf4: every one, as in `quantize`.

    Embeddings, output layers, and what an adapter holds whole stay as they are.

    Args:
        models: All models on the bases, checked before.
        dtype: The number format.
        device: Where they are held; None for where they are. One whole matrix is there at a time.

    Raises:
        ConfigError: nf4 cannot be had.
    """
    if dtype == "fp32":
        return
    held: dict[nn.Parameter, QuantizedLinear] = {}
    for model in models:
        outputs = [each.get_output_embeddings() for each in model.modules() if isinstance(each, PreTrainedModel)]
        kept = [each for layer in outputs if layer is not None for each in layer.parameters()]
        for parent, name, layer in _linear_layers(model, kept):
            weight = layer.get_parameter("weight")
            if not is_frozen(weight) or not _fits(layer, dtype):
                continue
            if weight not in held:
                held[weight] = QuantizedLinear(layer, "bf16" if dtype == "auto" else dtype, device)
                for each in held[weight].parameters():
                    mark_frozen(each)
            setattr(parent, name, held[weight])


def _linear_layers(body: nn.Module, kept: Collection[nn.Parameter]) -> list[tuple[nn.Module, str, nn.Linear | Conv1D]]:
    """The linear layers of a model with the modules that have them, without those of these weights."""
    left = {id(weight) for weight in kept}
    return [
        (parent, name, layer)
        for parent in body.modules()
        for name, layer in parent.named_children()
        if isinstance(layer, nn.Linear | Conv1D) and type(layer) in (nn.Linear, Conv1D) and id(layer.weight) not in left
    ]


def _fits(layer: nn.Linear | Conv1D, dtype: BaseDtype) -> bool:
    """Whether a layer can be held so."""
    if dtype == "auto":  # GPT-2's layers multiply in another order, with another rounding
        rows = layer.weight.split(4096)
        return isinstance(layer, nn.Linear) and all(torch.equal(part, part.bfloat16().float()) for part in rows)
    return dtype != "nf4" or matrix_of(layer).shape[1] % 2 == 0


def matrix_of(layer: nn.Linear | Conv1D) -> Float[Tensor, "out_features in_features"]:
    """The matrix of a layer, a row per output; GPT-2's layers hold it the other way around."""
    return layer.weight.T if isinstance(layer, Conv1D) else layer.weight


def num_weights(parameters: Iterable[Tensor]) -> int:
    """How many weights some parameters are, or stand for."""
    return sum(getattr(each, STANDS_FOR, each.numel()) for each in parameters)


def _in_int8(weight: Tensor) -> dict[str, Tensor]:
    """The numbers, and the scales in bf16, which multiplies without a further rounding of them."""
    scales = (weight.abs().amax(dim=1) / 127).bfloat16()
    scales = torch.where(scales > 0, scales, 1)
    return {"packed": (weight / scales[:, None].float()).round().clamp(-127, 127).to(torch.int8), "scales": scales}


def _in_nf4(weight: Tensor) -> dict[str, Tensor]:
    functions = load_bitsandbytes("nf4", weight.device).functional
    packed, state = functions.quantize_4bit(
        weight.float().contiguous(), blocksize=BLOCK, compress_statistics=True, quant_type="nf4"
    )
    outer = state.state2
    assert outer.blocksize == OUTER_BLOCK, outer.blocksize
    return {
        "packed": packed,
        "scales": state.absmax,
        "outer_scales": outer.absmax,
        "offset": state.offset,
    }


_HELD: dict[QuantizedDtype, Callable[[Tensor], dict[str, Tensor]]] = {
    "bf16": lambda weight: {"packed": weight.bfloat16()},
    "int8": _in_int8,
    "nf4": _in_nf4,
}


@cache
def _codes(device: torch.device) -> Tensor:
    """The 256 numbers that 8 bits stand for in the scales."""
    return load_bitsandbytes("nf4", device).functional.create_dynamic_map().to(device)
