"""Linear layers in 8 and 4 bits: their numbers by hand, their products and gradients, and the models that hold them."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, FalconConfig, LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

from kedge.config import config_from_settings
from kedge.models import LanguageModel, ScalarModel, TokenRows, autocast, hold_frozen, score_rows
from kedge.models.frozen import QuantizedDtype, QuantizedLinear, load_bitsandbytes, num_weights
from kedge_base.errors import ConfigError
from tests.models.families import ARCHITECTURES, language_model
from tests.tiny import tiny_reward_model, tiny_tokenizer

QUANTIZED: tuple[QuantizedDtype, ...] = ("int8", "nf4")
IDS = [[5, 9, 17, 33, 8, 60], [7, 44, 12]]
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""QLoRA (arXiv 2305.14314), appendix E."""


def layer_of(kind: str = "linear", *, bias: bool = True) -> nn.Linear | Conv1D:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = nn.Linear(70, 40, bias=bias) if kind == "linear" else Conv1D(40, 70)
        for parameter in layer.parameters():
            nn.init.normal_(parameter)
        return layer.requires_grad_(False)


def test_int8_is_the_nearest_multiple_of_each_rows_scale() -> None:
    layer = layer_of()
    layer.weight[3] = 0.0
    found = QuantizedLinear(layer, "int8").weight.numpy()
    for row, weights in zip(found, layer.weight.numpy(), strict=True):
        largest = max(abs(weights))
        # Half a step of a 127th; the scale is rounded to 8 significant bits.
        assert (np.abs(row - weights) <= largest / 127 / 2 * (1 + 2**-7)).all()
        assert len(set(np.abs(row))) <= 128


def test_nf4_is_the_nearest_of_16_numbers_times_the_scale_of_64() -> None:
    layer = layer_of()
    found, expected = QuantizedLinear(layer, "nf4").weight.numpy().ravel(), layer.weight.numpy().ravel()
    codes = np.array(NF4)
    for start in range(0, len(expected), 64):
        block = expected[start : start + 64]
        scale = np.abs(block).max()
        by_hand = codes[np.abs(block[:, None] / scale - codes).argmin(axis=1)] * scale
        # The scale itself has 8 bits, around the mean of all scales.
        np.testing.assert_allclose(found[start : start + 64], by_hand, rtol=0.03, atol=1e-6)


@pytest.mark.parametrize("dtype", QUANTIZED)
@pytest.mark.parametrize(("kind", "bias"), [("linear", True), ("linear", False), ("conv1d", True)])
def test_products_and_gradients_are_those_of_the_whole_matrix(dtype: QuantizedDtype, kind: str, bias: bool) -> None:
    layer = QuantizedLinear(layer_of(kind, bias=bias), dtype)
    inputs = torch.randn(2, 5, 70, generator=torch.Generator().manual_seed(1), requires_grad=True)
    direction = torch.randn(2, 5, 40, generator=torch.Generator().manual_seed(2))
    found = layer(inputs)
    expected = nn.functional.linear(inputs, layer.weight, layer.bias)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    gradients = [torch.autograd.grad(each, inputs, direction)[0] for each in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = layer(inputs)
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), expected, rtol=3e-2, atol=0.3)  # sums of 70 products of 8 bits
    torch.testing.assert_close(
        torch.autograd.grad(rounded, inputs, direction.bfloat16())[0], gradients[1], rtol=3e-2, atol=0.3
    )


@torch.no_grad()
def logprobs(model: LanguageModel) -> torch.Tensor:
    with autocast("bf16" if model.holds_bf16 else "fp32", "cpu"):
        logits = model.logits(model.hidden(TokenRows.of(IDS, model.device)))
    return logits.index_select(-1, (~model.forbidden).nonzero().squeeze(1)).log_softmax(-1)


@pytest.mark.parametrize("dtype", QUANTIZED)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_models_in_fewer_bits_say_nearly_the_same(name: str, dtype: QuantizedDtype) -> None:
    model = language_model(name)
    expected, count = logprobs(model), num_weights(model.parameters())
    hold_frozen(model, dtype, "fp32")
    # The weights are random and large, of two layers: nats per token, all of the vocabulary.
    assert float((logprobs(model) - expected).abs().mean()) < {"int8": 0.03, "nf4": 0.6}[dtype]
    layers = [each for each in model.causal.modules() if isinstance(each, QuantizedLinear)]
    assert len(layers) >= 6
    assert isinstance(model.causal.get_output_embeddings(), nn.Linear)
    assert num_weights(model.parameters()) == count
    assert not any(each.requires_grad for each in model.parameters())
    left = [each for each in model.causal.base_model.modules() if isinstance(each, nn.Linear | Conv1D)]
    assert all(dtype == "nf4" and each.in_features % 2 for each in left)  # Mamba has one with a single input


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_layers_of_a_class_of_their_own_are_quantized_where_they_compute_a_product(dtype: QuantizedDtype) -> None:
    sizes: Any = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "initializer_range": 0.2}
    for bias in (False, True):
        config = FalconConfig(vocab_size=300, pad_token_id=0, bias=bias, **sizes)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = LanguageModel(AutoModelForCausalLM.from_config(config), tiny_tokenizer())
        expected = logprobs(model)
        hold_frozen(model, dtype, "fp32")
        assert sum(isinstance(each, QuantizedLinear) for each in model.modules()) == 2 * 4
        assert 0 < float((logprobs(model) - expected).abs().mean()) < {"int8": 0.03, "nf4": 0.6}[dtype]


def test_the_bytes_of_a_matrix() -> None:
    """By hand, per weight: 1, and 2 bytes per row; ½, a byte per 64, and 4 bytes per 64 · 256 of them."""
    sizes: Any = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "num_attention_heads": 4}
    wanted = {"int8": 1 + 2 / 256, "nf4": 0.5 + 1 / 64 + 4 / 64 / 256}
    for dtype in QUANTIZED:
        model = LanguageModel(LlamaForCausalLM(LlamaConfig(vocab_size=300, **sizes)), tiny_tokenizer())
        hold_frozen(model, dtype, "bf16")
        layers = [each for each in model.modules() if isinstance(each, QuantizedLinear)]
        held = sum(each.nbytes for layer in layers for each in layer.parameters())
        weights = sum(each.in_features * each.out_features for each in layers)
        assert held / weights == pytest.approx(wanted[dtype], rel=5e-3)
        assert {each.weight.dtype for each in model.modules() if isinstance(each, nn.Embedding)} == {torch.bfloat16}


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_scores_of_a_reward_model(dtype: QuantizedDtype) -> None:
    model = ScalarModel(tiny_reward_model(), tiny_tokenizer())
    model.normalize(mean=0.3)
    expected = score_rows(model, IDS)
    hold_frozen(model, dtype, "fp32")
    found = score_rows(model, IDS)
    # A random head on two random layers.
    torch.testing.assert_close(found, expected, rtol=0, atol={"int8": 0.05, "nf4": 0.6}[dtype])
    assert not torch.equal(found, expected)
    assert model.head is not None
    assert model.head.weight.dtype == torch.float32


def test_what_cannot_be_had_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in QUANTIZED:
        settings = {"runtime.parallel": "shard", "runtime.frozen_dtype": dtype}
        with pytest.raises(ConfigError, match=f"frozen_dtype={dtype} does not work with runtime.parallel=shard"):
            config_from_settings("ppo", settings)
    with pytest.raises(ConfigError, match=r"runtime.frozen_dtype=nf4 runs on a CPU or an NVIDIA GPU, not on mps"):
        load_bitsandbytes("runtime.frozen_dtype=nf4", torch.device("mps"))
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r"runtime.frozen_dtype=nf4 needs bitsandbytes: pip install -e '\.\["):
        load_bitsandbytes("runtime.frozen_dtype=nf4", torch.device("cpu"))
