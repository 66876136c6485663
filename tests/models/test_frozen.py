"""Frozen roles in bf16: half the bytes, the same results where products run in bf16."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kedge.models import (
    HostWeights,
    LanguageModel,
    ScalarModel,
    TokenRows,
    autocast,
    hold_frozen,
    score_rows,
)
from tests.models.families import ARCHITECTURES, causal_lm, language_model
from tests.tiny import tiny_reward_model, tiny_tokenizer

IDS = [[5, 9, 17, 33, 8, 60], [7, 44, 12]]


@torch.no_grad()
def logits(model: LanguageModel) -> torch.Tensor:
    with autocast("bf16", "cpu"):
        return model.logits(model.hidden(TokenRows.of(IDS, model.device)))


def num_bytes(model: nn.Module) -> int:
    return sum(each.nbytes for each in model.parameters())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_auto_changes_no_bit_of_products_in_bf16(name: str) -> None:
    model = language_model(name)
    expected, before = logits(model), num_bytes(model)
    hold_frozen(model, "auto", "bf16")
    assert torch.equal(logits(model), expected)
    assert num_bytes(model) < before


def test_auto_holds_embeddings_where_they_lose_nothing() -> None:
    """By hand: all weights of a Llama but its three norms of 16 numbers; two bytes each instead of four."""
    causal = causal_lm("llama")
    for weight in causal.parameters():
        weight.data = weight.data.bfloat16().float()  # as if loaded from a file in bf16
    model = LanguageModel(causal, tiny_tokenizer())
    expected, before = logits(model), num_bytes(model)
    norms = 5 * 16 * 4
    hold_frozen(model, "auto", "bf16")
    assert torch.equal(logits(model), expected)
    assert num_bytes(model) == (before - norms) // 2 + norms


def test_nothing_changes_where_products_run_in_fp32() -> None:
    model = language_model("llama")
    hold_frozen(model, "auto", "fp32")
    assert {each.dtype for each in model.parameters()} == {torch.float32}
    assert not any(each.requires_grad for each in model.parameters())


def test_scores_of_a_reward_model_in_bf16() -> None:
    """bf16 keeps 8 bits: 2e-2 is five roundings of a number."""
    model = ScalarModel(tiny_reward_model(), tiny_tokenizer())
    model.normalize(mean=0.3)
    expected = score_rows(model, IDS)
    hold_frozen(model, "bf16", "fp32")
    found = score_rows(model, IDS)
    assert found.dtype == torch.float32
    assert not torch.equal(found, expected)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    assert model.head is not None
    assert model.head.weight.dtype == model.shift.dtype == torch.float32


def test_a_model_that_was_loaded_in_host_memory_leaves_only_its_weights_there() -> None:
    """As beside adapters on a rounded base: rows are placed on the device of the buffers."""
    model = ScalarModel(tiny_reward_model(), tiny_tokenizer()).requires_grad_(False)
    HostWeights(model, torch.device("meta"))
    assert {weight.device.type for weight in model.parameters()} == {"cpu"}
    assert {buffer.device.type for buffer in model.buffers()} == {model.device.type} == {"meta"}


def test_weights_in_the_hosts_memory_change_no_score() -> None:
    """Here the device is the CPU, too; what can be tested is that every weight is there, and is put back."""
    model = ScalarModel(tiny_reward_model(), tiny_tokenizer()).requires_grad_(False)
    expected = score_rows(model, IDS)
    model.host = HostWeights(model, torch.device("cpu")).on_device
    before = {name: each.data_ptr() for name, each in model.named_parameters()}
    with model.host():
        for weight in model.parameters():
            weight.data = weight.data.clone()  # as on another device
    assert {name: each.data_ptr() for name, each in model.named_parameters()} == before
    assert torch.equal(score_rows(model, IDS), expected)
