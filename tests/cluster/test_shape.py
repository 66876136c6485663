"""Shapes of models, against the parameter counts that their publishers state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.cluster import parse_parameters, read_shape, typical_shape
from kedge_base.errors import ConfigError, ModelError

LLAMA_8B = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
            "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False}  # fmt: skip
QWEN_30B_A3B = {"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
                "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
                "num_experts_per_tok": 8, "vocab_size": 151936, "tie_word_embeddings": False}  # fmt: skip
DEEPSEEK_V3 = {"hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
               "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256,
               "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "kv_lora_rank": 512,
               "qk_rope_head_dim": 64, "vocab_size": 129280, "tie_word_embeddings": False}  # fmt: skip
MIXTRAL = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
           "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000,
           "tie_word_embeddings": False}  # fmt: skip
GPT_2 = {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}


def written(folder: Path, entries: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(entries), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("entries", "total", "active"),
    [
        (LLAMA_8B, 8.03e9, 8.03e9),
        (QWEN_30B_A3B, 30.5e9, 3.3e9),
        (MIXTRAL, 46.7e9, 12.9e9),
        (GPT_2, 0.124e9, 0.124e9),
    ],
)
def test_a_configuration_gives_the_stated_number_of_parameters(
    entries: dict[str, Any], total: float, active: float, tmp_path: Path
) -> None:
    shape = read_shape(written(tmp_path, {"model_type": "any", **entries}))
    # Statements are rounded, and norms, biases and GPT-2's positions are not counted.
    assert shape.parameters == pytest.approx(total, rel=0.015)
    assert shape.active == pytest.approx(active, rel=0.02)


def test_a_mixture_with_latent_attention_and_dense_blocks(tmp_path: Path) -> None:
    shape = read_shape(written(tmp_path, DEEPSEEK_V3))
    # Stated: 671B and 37B. The two small matrices of latent attention count as one large one: 1.1B more.
    assert (shape.parameters, shape.active) == pytest.approx((671e9, 37e9), rel=0.05)


def test_keys_and_values_of_one_token(tmp_path: Path) -> None:
    # Llama-3.1-8B: 2 · 32 layers · 8 heads · 128 · 2 bytes = 128 KiB.
    assert read_shape(written(tmp_path, LLAMA_8B)).key_value_bytes == 131072
    # DeepSeek-V3 keeps 512 + 64 numbers per token and layer: 2 · 61 · 576 bytes.
    assert read_shape(written(tmp_path, DEEPSEEK_V3)).key_value_bytes == 70272
    nested = {"text_config": LLAMA_8B, "vision_config": {}}
    assert read_shape(written(tmp_path, nested)).key_value_bytes == 131072


@pytest.mark.parametrize(("text", "number"), [("7B", 7e9), ("1.5b", 1.5e9), ("350M", 3.5e8), ("7000000000", 7e9)])
def test_sizes_are_written_as_on_model_cards(text: str, number: float) -> None:
    assert parse_parameters(text) == number
    assert typical_shape(number).parameters == number


@pytest.mark.parametrize("text", ["", "7 billion", "-7B", "7X", "0B", "100", "nanB", "99T"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="a number of parameters is written 7B"):
        parse_parameters(text)


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([], "not a JSON object"),
        ({}, "hidden_size is missing"),
        ({**LLAMA_8B, "num_hidden_layers": "many"}, "num_hidden_layers is 'many'"),
        ({**LLAMA_8B, "vocab_size": -1}, "vocab_size is -1"),
        ({**LLAMA_8B, "num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({**MIXTRAL, "num_experts_per_tok": None}, "num_experts_per_tok is missing"),
    ],
)
def test_a_damaged_configuration_is_one_line(entries: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=said):
        read_shape(written(tmp_path, entries))
    with pytest.raises(ModelError, match="No such file"):
        read_shape(tmp_path / "other")
