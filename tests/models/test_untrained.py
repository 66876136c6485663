"""An untrained tokenizer and model, loaded by plain transformers."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kedge.models.untrained import save_untrained_llama, train_tokenizer

TEXTS = ["My boss hid my kite at the zoo.", "The boss of the zoo: a kite, “really”?\n\nTL;DR:"] * 20
SIZES = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "context_length": 32, "initializer_range": 0.1}


def test_words_become_tokens_and_any_text_comes_back() -> None:
    tokenizer = train_tokenizer(TEXTS, vocab_size=400)
    assert len(tokenizer.encode(" boss")) == 1
    for text in (*TEXTS[:2], "Žluťoučký kůň 🐴 was never seen"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id}) == 2


@pytest.mark.parametrize("seed", [0, 1])
def test_the_folder_loads_and_the_seed_alone_decides_the_weights(tmp_path: Path, seed: int) -> None:
    tokenizer = train_tokenizer(TEXTS, vocab_size=300)
    state = torch.random.get_rng_state()
    save_untrained_llama(tmp_path / "one", tokenizer, **SIZES, seed=seed)
    assert torch.equal(torch.random.get_rng_state(), state)
    save_untrained_llama(tmp_path / "two", tokenizer, **SIZES, seed=seed)
    one, two = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("one", "two"))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert one.config.eos_token_id == tokenizer.eos_token_id
    # 16 × the vocabulary, thousands of draws: the spread of their spread is under 2 %; 0.02, the default, is far off.
    assert one.get_input_embeddings().weight.std().item() == pytest.approx(0.1, rel=0.05)
    assert AutoTokenizer.from_pretrained(tmp_path / "one").encode(TEXTS[0]) == tokenizer.encode(TEXTS[0])
