"""Frozen weights: stored in 16, 8 or 4 bits, and optionally in host memory between passes.

bf16: every number is rounded to 8 significant bits. 2 bytes per weight.
int8: every row of a matrix has a scale, its largest number / 127. 1 byte per weight.
nf4:  every 64 numbers have a scale, itself in 8 bits; each number is one of 16 levels, dense around 0. 0.52 bytes.

A product converts the weights to the number format of its inputs, which represents bf16 and int8 exactly; int8 is
scaled after the product, and nf4 is dequantized for one product at a time. Gradients reach the inputs; the weights are
fixed. Where products run in bf16 anyway, a matrix held in bf16 gives bit-identical results to one held in fp32 and
rounded in every pass. Normalization, heads and everything else that is computed in fp32 keep fp32 weights.

Source: int8, rows as in Dettmers et al. 2022 (arXiv 2208.07339), of weights only; nf4, Dettmers et al. 2023 (arXiv
2305.14314), by bitsandbytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from threading import RLock
from typing import Any, Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from kedge.models.adapters import is_frozen, is_product, mark_frozen
from kedge.models.language import LanguageModel
from kedge.models.precision import Precision
from kedge.models.scalar import ScalarModel
from kedge.ranks import ALONE, Ranks
from kedge_base.errors import ConfigError, install_line

QuantizedDtype = Literal["bf16", "int8", "nf4"]
FrozenDtype = Literal["auto", "fp32", "bf16", "int8", "nf4"]

BLOCK = 64
OUTER_BLOCK = 256
"""Numbers per scale in nf4, and scales per second-level scale, as in the paper."""

STANDS_FOR = "stands_for"
"""Attribute with the number of weights in a packed parameter."""


def load_bitsandbytes(purpose: str, device: torch.device) -> Any:
    """Import bitsandbytes.

    Args:
        purpose: The setting that needs it, for the message.
        device: The device that it has to support.

    Raises:
        ConfigError: It is not installed, or does not support the device.
    """
    try:
        import bitsandbytes
    except ImportError as error:
        raise ConfigError(f"{purpose} needs bitsandbytes: {install_line('bitsandbytes')}") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"{purpose} runs on a CPU or an NVIDIA GPU, not on {device.type}")
    return bitsandbytes


class QuantizedLinear(nn.Module):
    """A replacement for a linear layer that is not trained, with its matrix in fewer bits.

    Args:
        layer: The layer; its bias is kept as it is.
        dtype: The number format.
        device: The device on which the weights are rounded and stored; None for their current one.
    """

    packed: nn.Parameter
    scales: nn.Parameter
    """Missing in bf16."""

    def __init__(self, layer: nn.Linear | Conv1D, dtype: QuantizedDtype, device: torch.device | None = None) -> None:
        super().__init__()
        weight = matrix_of(layer).detach().to(device)
        self.out_features, self.in_features = weight.shape
        self.dtype: QuantizedDtype = dtype
        self._is_transposed = isinstance(layer, Conv1D)
        self.bias = layer.bias
        # All are parameters, so that they move with the model.
        for name, tensor in _HELD[dtype](weight).items():
            parameter = nn.Parameter(tensor, requires_grad=False)
            setattr(parameter, STANDS_FOR, weight.numel() if name == "packed" else 0)
            self.register_parameter(name, parameter)

    @property
    def weight(self) -> Float[Tensor, "out_features in_features"]:
        """The matrix that multiplies the inputs, in fp32."""
        whole = self._whole(torch.float32)
        return whole * self.scales.float()[:, None] if self.dtype == "int8" else whole

    def saved_weight(self) -> Tensor:
        """The matrix in the orientation of the layer that was replaced."""
        return self.weight.T if self._is_transposed else self.weight

    def forward(self, inputs: Float[Tensor, "*rest in_features"]) -> Float[Tensor, "*rest out_features"]:
        """The product, in autocast's number format or the inputs'."""
        kind = inputs.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else inputs.dtype
        return cast(Tensor, _Product.apply(inputs.to(dtype), self))

    def times(self, inputs: Float[Tensor, "*rest in_features"]) -> Float[Tensor, "*rest out_features"]:
        """The product: inputs · weightᵀ + bias."""
        whole = self._whole(inputs.dtype)
        bias = None if self.bias is None else self.bias.to(inputs.dtype)
        if self.dtype != "int8":
            return functional.linear(inputs, whole, bias)
        product = functional.linear(inputs, whole) * self.scales.to(inputs.dtype)
        return product if bias is None else product + bias

    def times_transposed(self, outputs: Float[Tensor, "*rest out_features"]) -> Float[Tensor, "*rest in_features"]:
        """The gradient of the inputs: outputs · weight."""
        scaled = outputs * self.scales.to(outputs.dtype) if self.dtype == "int8" else outputs
        return scaled @ self._whole(outputs.dtype)

    def _whole(self, dtype: torch.dtype) -> Tensor:
        """Dequantize the matrix, except for int8's row scales."""
        if self.dtype != "nf4":
            return self.packed.to(dtype)
        from bitsandbytes.functional import QuantState, dequantize_4bit, dequantize_blockwise

        outer = self.get_parameter("outer_scales")
        codes = _codes(self.packed.device)
        scales = dequantize_blockwise(self.scales, absmax=outer, code=codes, blocksize=OUTER_BLOCK)
        scales += self.get_parameter("offset")
        shape = torch.Size((self.out_features, self.in_features))
        kept = QuantState(scales, shape=shape, blocksize=BLOCK, quant_type="nf4", dtype=dtype)
        return dequantize_4bit(self.packed, kept)


class _Product(torch.autograd.Function):
    """A product with a backward pass that dequantizes the weights again instead of keeping them."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, layer: QuantizedLinear) -> Tensor:
        """The product."""
        ctx.layer = layer
        return layer.times(inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """The gradient of the inputs."""
        return ctx.layer.times_transposed(gradients[0]), None


def quantize(body: nn.Module, dtype: QuantizedDtype, *, kept: Collection[nn.Parameter]) -> None:
    """Replace the linear layers of a model by quantized ones, in place.

    Not replaced are subclasses that compute more than a product, stacked matrices of experts, and, in nf4, matrices
    with rows of odd length.

    Args:
        body: The model, already checked, since checks need its original weights.
        dtype: The number format.
        kept: Weights of layers to leave unchanged.
    """
    replaced: dict[nn.Module, QuantizedLinear] = {}
    for parent, name, layer in _linear_layers(body, kept):
        if not _fits(layer, dtype):
            continue
        if layer not in replaced:  # a layer may have two names
            replaced[layer] = QuantizedLinear(layer, dtype)
        setattr(parent, name, replaced[layer])


@torch.no_grad()
def hold_bases(models: Iterable[nn.Module], dtype: FrozenDtype, device: torch.device | None = None) -> None:
    """Convert the matrices under adapters to a number format, in place; weights that models share stay shared.

    auto: bf16 for matrices that bf16 can represent, as in most published models: products are bit-identical. bf16,
    int8, nf4: every matrix, as in `quantize`.

    Embeddings, output layers, modules that an adapter holds in full, and layers with DoRA, which reads the matrix
    itself in every pass, are unchanged.

    Args:
        models: All models on the bases, already checked.
        dtype: The number format.
        device: The device to store them; None for their current one. It needs room for one full matrix at a time.

    Raises:
        ConfigError: nf4 is not available, or an adapter with DoRA is trained on matrices to be rounded.
    """
    if dtype == "fp32":
        return
    replaced: dict[nn.Parameter, QuantizedLinear] = {}
    for model in models:
        outputs = [each.get_output_embeddings() for each in model.modules() if isinstance(each, PreTrainedModel)]
        kept = [each for layer in outputs if layer is not None for each in layer.parameters()]
        for parent, name, layer in _linear_layers(model, kept):
            weight = layer.get_parameter("weight")
            magnitudes = list(cast(nn.Module, getattr(parent, "lora_magnitude_vector", nn.Module())).parameters())
            if dtype != "auto" and any(each.requires_grad for each in magnitudes):
                raise ConfigError(
                    f"adapter.base_dtype={dtype} does not work with the adapter that is trained further: it has DoRA, "
                    "which needs the whole matrices in every pass; use adapter.base_dtype=auto"
                )
            if magnitudes or not is_frozen(weight) or not _fits(layer, dtype):
                continue
            if weight not in replaced:
                replaced[weight] = QuantizedLinear(layer, "bf16" if dtype == "auto" else dtype, device)
                for each in replaced[weight].parameters():
                    mark_frozen(each)
            setattr(parent, name, replaced[weight])


@torch.no_grad()
def hold_frozen(
    model: LanguageModel | ScalarModel, dtype: FrozenDtype, precision: Precision, ranks: Ranks = ALONE
) -> None:
    """Freeze a model in place, and convert its weights to a number format.

    auto: bf16 where that does not change results of products in bf16: the matrices of linear layers, and embeddings
    that bf16 can represent (most published models are saved in bf16). If products run in fp32, nothing is converted.
    bf16: also all other embeddings, and the matrices of experts. The role's products then run in bf16. int8, nf4: as
    bf16, and linear layers in 8 or 4 bits, except the output layer, whose rounding affects every logit.

    Args:
        model: A checked model whose weights are not shared.
        dtype: The format.
        precision: Number format of the run's matrix products.
        ranks: If they shard their models, the first has the weights and decides for all; not for int8 and nf4.

    Raises:
        ConfigError: nf4 is not available.
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
        # A subclass may do more than look up a row.
        return [not exactly or (type(each) is nn.Embedding and _fits_bf16(each.weight)) for each in tables]

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
    """The weights that only matrix products read, and the biases of those products.

    Args:
        body: A model or a part of it.
        exactly: Only weights that autocast would round. Subclasses may use their weights differently, and grouped
            products of experts do not round fp32 matrices.
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


def _fits_bf16(weight: Tensor) -> bool:
    """True if bf16 can represent all numbers of a matrix."""
    return all(torch.equal(part, part.bfloat16().float()) for part in weight.split(4096))


def _in_fp32(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """Convert a looked-up embedding to fp32, in which the layers' outputs are added to it."""
    return output.float()


class HostWeights:
    """Keeps a frozen module's weights in host memory, and moves them to its device when needed.

    Nothing is copied back: the weights do not change. Buffers, which are small, are always on the device.

    Args:
        module: The module, on its device or in host memory.
        device: The device of its passes.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._weights = list(module.parameters())
        self._device = device
        # Two threads may score at once; one must not remove the other's weights from the device.
        self._turn = RLock()
        pinned = device.type == "cuda"  # pinned memory is copied directly
        for weight in self._weights:
            weight.data = weight.data.cpu().pin_memory() if pinned else weight.data.cpu()
        module._apply(lambda each: each if isinstance(each, nn.Parameter) else each.to(device))

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Move the weights to the device for the block."""
        with self._turn:
            here = [weight.data for weight in self._weights]
            try:
                for weight in self._weights:
                    weight.data = weight.data.to(self._device, non_blocking=True)
                yield
            finally:
                for weight, data in zip(self._weights, here, strict=True):
                    weight.data = data


def _linear_layers(body: nn.Module, kept: Collection[nn.Parameter]) -> list[tuple[nn.Module, str, nn.Linear | Conv1D]]:
    """The linear layers of a model with their parent modules and names, except layers whose weights are kept.

    A layer inside PEFT's wrapper of a parameter (with `parameter_name`), which replaces the weight itself, is left out.
    """
    excluded = {id(weight) for weight in kept}
    return [
        (parent, name, layer)
        for parent in body.modules()
        if not hasattr(parent, "parameter_name")
        for name, layer in parent.named_children()
        if (type(layer) is Conv1D or (isinstance(layer, nn.Linear) and is_product(layer)))
        and id(layer.weight) not in excluded
    ]


def _fits(layer: nn.Linear | Conv1D, dtype: FrozenDtype) -> bool:
    """True if a layer can be stored in this number format."""
    if dtype == "auto":  # GPT-2's layers, and Falcon's, multiply in a different order, which rounds differently
        return type(layer) is nn.Linear and _fits_bf16(layer.weight)
    return dtype != "nf4" or matrix_of(layer).shape[1] % 2 == 0


def matrix_of(layer: nn.Linear | Conv1D) -> Float[Tensor, "out_features in_features"]:
    """Return the matrix of a layer, with a row per output; GPT-2's layers store the transpose."""
    return layer.weight.T if isinstance(layer, Conv1D) else layer.weight


def num_weights(parameters: Iterable[Tensor]) -> int:
    """Count the weights in some parameters, in quantized ones as before quantization."""
    return sum(getattr(each, STANDS_FOR, each.numel()) for each in parameters)


def _in_int8(weight: Tensor) -> dict[str, Tensor]:
    """Quantize to int8, with scales in bf16, so that a product does not round them further."""
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
    """The 256 numbers that nf4's 8-bit scales can take."""
    return load_bitsandbytes("nf4", device).functional.create_dynamic_map().to(device)
