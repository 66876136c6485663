"""Token-by-token decoding with a cache, packed and padded, against full passes over every row."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from kedge.models import LanguageModel, autocast, hold_frozen, precision
from kedge.models.packing import packed
from kedge.models.packing import rows as packing_rows
from kedge.models.packing.decoders import Decoder, PaddedDecoder
from kedge.models.packing.packed import MIN_GROWTH, PackedDecoder
from kedge.models.packing.trunk import Trunk
from kedge_base.errors import ModelError
from tests.models.families import ARCHITECTURES, PACKED, language_model

# Of different lengths, unsorted; the first and the last are the same prompt.
PROMPTS = [[5, 6, 7], [20], [30, 31, 32, 33, 34], [40, 41], [5, 6, 7]]
# The same with a beginning that all have in common; the last has nothing else.
START = list(range(50, 60))
BEGUN = [*([*START, *prompt] for prompt in PROMPTS[:-1]), START]
# More than the cache's first two allocations, less than the context of 256.
NUM_STEPS = 2 * MIN_GROWTH + 12


@pytest.fixture(params=["as it can", "padded"])
def layout(request, monkeypatch) -> str:
    if request.param == "padded":
        monkeypatch.setattr(Trunk, "packs", lambda self, longest: False)
    return request.param


def new_tokens(num_steps: int) -> torch.Tensor:
    return torch.randint(3, 300, (num_steps, len(PROMPTS)), generator=torch.Generator().manual_seed(0))


def start(model: LanguageModel, name: str, layout: str, rows: list[list[int]], num_steps: int) -> Decoder:
    """The decoder, of the kind it should be: a mistake found at load makes it one of a slower kind."""
    decoder = model.trunk.decoder(rows, max_new_tokens=num_steps, pad_id=0)
    assert isinstance(decoder, PackedDecoder if layout == "as it can" and name in PACKED else PaddedDecoder)
    assert decoder.can_drop_rows
    return decoder


def from_scratch(model: LanguageModel, row: list[int]) -> torch.Tensor:
    """The oracle: transformers' state at the last token of the row alone."""
    return model.causal.base_model(input_ids=torch.tensor([row])).last_hidden_state[0, -1]


def assert_states(model: LanguageModel, hidden: torch.Tensor, rows: list[list[int]]) -> None:
    expected = torch.stack([from_scratch(model, row) for row in rows])
    torch.testing.assert_close(hidden, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.no_grad()
def test_reading_token_by_token_is_reading_all_at_once(name, layout):
    assert_reading(name, layout, PROMPTS)


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("as_on_a_gpu", [False, True])
@torch.no_grad()
def test_what_all_prompts_begin_with_is_read_for_each_of_them(name, as_on_a_gpu, monkeypatch):
    for module in (packing_rows, packed):
        monkeypatch.setattr(module, "on_accelerator", lambda device: as_on_a_gpu)
    assert_reading(name, "as it can", BEGUN)


def assert_reading(name: str, layout: str, prompts: list[list[int]]) -> None:
    """Each step gives the states of a whole pass over its rows."""
    model = language_model(name)
    rows = [list(prompt) for prompt in prompts]
    decoder = start(model, name, layout, rows, NUM_STEPS)
    assert_states(model, decoder.hidden, rows)
    for step, tokens in enumerate(new_tokens(NUM_STEPS)):
        hidden = decoder.step(tokens)
        rows = [[*row, token] for row, token in zip(rows, tokens.tolist(), strict=True)]
        assert hidden is decoder.hidden
        if step % 15 == 0:
            assert_states(model, hidden, rows)
    assert_states(model, decoder.hidden, rows)


@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.no_grad()
def test_dropping_rows_leaves_the_others_as_they_are(name, layout):
    model = language_model(name)
    rows = [list(prompt) for prompt in PROMPTS]
    decoder = start(model, name, layout, rows, 9)
    columns = torch.arange(len(rows))
    for step, tokens in enumerate(new_tokens(9)):
        # Drop a row before the first token, then the longest prompt (which set the width), then all but one.
        if kept := {0: [0, 2, 3, 4], 4: [0, 2, 3], 7: [1]}.get(step):
            decoder.keep(torch.tensor(kept))
            rows, columns = [rows[row] for row in kept], columns[kept]
            assert_states(model, decoder.hidden, rows)
        decoder.step(tokens[columns])
        rows = [[*row, token] for row, token in zip(rows, tokens[columns].tolist(), strict=True)]
        assert_states(model, decoder.hidden, rows)
    assert len(rows) == 1


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("as_on_a_gpu", [False, True])
@torch.no_grad()
def test_rows_get_longer_each_by_itself(name, as_on_a_gpu, monkeypatch):
    """Rows are read on by texts of any length, some rows wait while others step, and rows are dropped between."""
    for module in (packing_rows, packed):
        monkeypatch.setattr(module, "on_accelerator", lambda device: as_on_a_gpu)
    model = language_model(name)
    rows = [list(prompt) for prompt in PROMPTS]
    decoder = start(model, name, "as it can", rows, 250)
    generator = torch.Generator().manual_seed(1)
    for turn in range(4):
        for tokens in new_tokens(6):
            speaks = torch.rand(len(rows), generator=generator) < (0.5 if turn else 2.0)
            decoder.step(tokens[: len(rows)], speaks if turn else None)
            rows = [[*row, token] if on else row for row, token, on in zip(rows, tokens.tolist(), speaks, strict=False)]
            assert_states(model, decoder.hidden, rows)
        if turn == 2:
            kept = [3, 0, 1]
            rows = [rows[row] for row in kept]
            decoder.keep(torch.tensor(kept))
        lengths = [1] * len(rows) if turn == 1 else torch.randint(1, 40, (len(rows),), generator=generator).tolist()
        texts = [torch.randint(3, 300, (length,), generator=generator).tolist() for length in lengths]
        decoder.extend(texts)
        rows = [row + text for row, text in zip(rows, texts, strict=True)]
        assert_states(model, decoder.hidden, rows)


@torch.no_grad()
def test_a_prompt_that_several_rows_continue_is_read_once():
    model = language_model("llama")
    model.trunk.decoder(PROMPTS, max_new_tokens=2, pad_id=0)  # the first one tries out what the model can do
    seen = []
    model.trunk.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: seen.append(output.shape[:2]))
    decoder = model.trunk.decoder(PROMPTS, max_new_tokens=2, pad_id=0)
    assert seen == [(1, 3 + 1 + 5 + 2)]
    decoder.step(torch.tensor([9, 9, 9, 9, 10]))
    assert seen[1] == (5, 1)
    model.trunk.decoder(BEGUN, max_new_tokens=2, pad_id=0)
    assert seen[2] == (1, 10 + 3 + 1 + 5 + 2)
    model.trunk.decoder([[5] * 30, [5] + [6] * 30], max_new_tokens=2, pad_id=0)
    assert seen[3] == (1, 30 + 31), "so short a start is not worth it"


needs_bf16 = pytest.mark.skipif(not precision._can_prepack(), reason="needs a processor with bf16")


@needs_bf16
@pytest.mark.parametrize("name", PACKED)
@torch.no_grad()
def test_prepacked_weights_give_the_same_states(name):
    model = language_model(name)
    found = []
    for context in (precision.prepacked(model, "bf16"), nullcontext()):
        with autocast("bf16", "cpu"), context:
            decoder = model.trunk.decoder(PROMPTS, max_new_tokens=3, pad_id=0)
            states = [decoder.hidden, *(decoder.step(tokens) for tokens in new_tokens(2))]
            found.append(torch.stack([state.float() for state in states]))
    torch.testing.assert_close(*found, atol=1e-2, rtol=1e-2)


@needs_bf16
def test_prepacked_layers_are_as_they_were_after_it():
    model = language_model("llama")
    layer = model.trunk.model.layers[0].mlp.up_proj
    states = torch.randn(3, layer.in_features)

    def fail() -> None:
        assert "forward" in vars(layer)
        layer(states).sum().backward()
        raise KeyError

    with autocast("bf16", "cpu"), pytest.raises(KeyError), precision.prepacked(model, "bf16"):
        fail()
    assert layer.weight.grad is not None
    assert "forward" not in vars(layer)
    with precision.prepacked(model, "fp32"):
        assert "forward" not in vars(layer)


@needs_bf16
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_frozen_weights_are_prepacked_where_there_is_room_those_in_bf16_if_nothing_is_trained(dtype, monkeypatch):
    model = language_model("llama")
    hold_frozen(model, dtype, "bf16")
    layer = model.trunk.model.layers[0].mlp.up_proj

    def is_prepacked() -> bool:
        with precision.prepacked(model, "bf16"):
            return "forward" in vars(layer)

    assert is_prepacked()
    model.value_head = torch.nn.Linear(4, 1)
    assert is_prepacked() == (dtype == "fp32")
    model.value_head = None
    monkeypatch.setattr(precision, "free_memory", lambda: 1000)
    assert not is_prepacked()


def test_a_model_without_a_known_cache_is_refused():
    class Forgetful(torch.nn.Linear):
        def forward(self, input_ids, state=None):
            return super().forward(input_ids)

    with pytest.raises(ModelError, match="Forgetful has no key–value cache"):
        PaddedDecoder(Forgetful(1, 1), [[1]], pad_id=0, takes_positions=False)
