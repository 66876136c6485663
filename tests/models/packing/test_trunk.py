"""A trunk's states and gradients in every layout, against transformers' own pass over each row alone."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from kedge.models import LanguageModel, TokenRows
from kedge.models.packing.decoders import PaddedDecoder
from kedge.models.packing.packed import PackedDecoder
from kedge.models.packing.rows import group_by_length
from kedge.models.packing.trunk import Trunk
from tests.models.families import ARCHITECTURES, OTHERS, PACKED, WINDOW, language_model
from tests.tiny import tiny_tokenizer

# Unsorted; 9 and 7 share a rectangle, 5 and 5 fill one, 1 is alone.
LENGTHS = (5, 9, 1, 7, 5, 2)
ROWS = [[10 * row + place for place in range(1, length + 1)] for row, length in enumerate(LENGTHS)]
LAYOUTS = ["as it can", "padded", "in pieces"]


@pytest.fixture(params=LAYOUTS)
def layout(request, monkeypatch) -> str:
    if request.param == "padded":
        monkeypatch.setattr(Trunk, "packs", lambda self, longest: False)
    return request.param


def states(model: LanguageModel, layout: str) -> list[torch.Tensor]:
    """Each row's hidden states in the layout."""
    pieces = [[row] for row in ROWS] if layout == "in pieces" else [ROWS]
    hidden = torch.cat([model.hidden(TokenRows.of(piece)) for piece in pieces])
    return list(hidden.split(LENGTHS))


def states_alone(model: LanguageModel) -> list[torch.Tensor]:
    """The oracle: one row at a time through the transformers model."""
    return [model.causal.base_model(input_ids=torch.tensor([row])).last_hidden_state[0] for row in ROWS]


def gradient(model: LanguageModel, hidden: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gradient of a loss with a random weight for every token and unit."""
    model.zero_grad()
    weights = torch.randn(sum(LENGTHS), 16, generator=torch.Generator().manual_seed(0)) / sum(LENGTHS)
    (torch.cat(hidden) * weights).sum().backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_states_and_gradients_are_those_of_each_row_alone(name, layout):
    model = language_model(name)
    hidden, expected = states(model, layout), states_alone(model)
    for ours, theirs in zip(hidden, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    ours, theirs = gradient(model, hidden), gradient(model, expected)
    assert ours.keys() == theirs.keys()
    for parameter, expected_gradient in theirs.items():
        torch.testing.assert_close(ours[parameter], expected_gradient, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_can_be_packed_is_found_out(name):
    trunk = language_model(name).trunk
    assert trunk.packs(WINDOW + 1) == (name in PACKED)
    assert trunk.packs(WINDOW) == (name in PACKED or name == "mistral")
    decoder = trunk.decoder([[5], [6, 7, 8]], max_new_tokens=WINDOW, pad_id=0)
    assert isinstance(decoder, PackedDecoder if name in PACKED else PaddedDecoder)
    assert decoder.can_drop_rows


def test_scores_that_are_hardly_capped_are_capped_all_the_same():
    config = copy.deepcopy(OTHERS["gemma2"])
    config.attn_logit_softcapping = 1000.0
    causal = AutoModelForCausalLM.from_config(config).eval()
    assert not LanguageModel(causal, tiny_tokenizer()).trunk.packs(1)


def test_packed_rows_reach_the_layers_without_padding(monkeypatch):
    model = language_model("llama")
    seen = []
    model.trunk.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    model.hidden(TokenRows.of(ROWS))
    assert seen == [(1, sum(LENGTHS), 16)]


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "mamba"])
def test_activations_that_are_computed_again_give_the_same_gradient(name):
    found, num_kept = [], []
    for checkpointing in (False, True):
        model = language_model(name)
        if checkpointing:
            model.trunk.checkpoint_activations()
        kept: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(kept.append, kept.__getitem__):
            states(model, "as it can")
        num_kept.append(len(kept))
        found.append(gradient(model, states(model, "as it can")))
        assert not model.trunk.model.training
    plain, again = found
    assert num_kept[1] < 0.5 * num_kept[0]
    for parameter, expected in plain.items():
        torch.testing.assert_close(again[parameter], expected, atol=1e-6, rtol=1e-5)


def test_rows_of_similar_length_share_a_rectangle():
    assert list(group_by_length((10, 9, 7, 6, 5, 2))) == [[10, 9, 7], [6, 5], [2]]
    assert list(group_by_length((4,))) == [[4]]
