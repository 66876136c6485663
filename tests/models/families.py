"""Architectures beyond the three of `tests.tiny`, including some that cannot be packed."""

from __future__ import annotations

import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    MambaConfig,
    MistralConfig,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from kedge.models import LanguageModel
from tests.tiny import FAMILIES, tiny_causal_lm, tiny_tokenizer

SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": 300}
SIZES = {"num_hidden_layers": 2, "hidden_size": 16, "initializer_range": 0.2, **SPECIAL}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32, "max_position_embeddings": 256}
WINDOW = 4

OTHERS: dict[str, PreTrainedConfig] = {
    "phi": PhiConfig(**SIZES, num_attention_heads=2, intermediate_size=32, resid_pdrop=0.1),
    "mistral": MistralConfig(**SIZES, **HEADS, sliding_window=WINDOW),
    # Caps the attention scores.
    "gemma2": Gemma2Config(
        **SIZES, **HEADS, head_dim=8, query_pre_attn_scalar=8, attn_logit_softcapping=1.0, sliding_window=256
    ),
    # Takes no positions and adds a bias by distance (ALiBi).
    "bloom": BloomConfig(n_layer=2, n_head=2, hidden_size=16, initializer_range=0.2, hidden_dropout=0.1, **SPECIAL),
    # Carries a state along the sequence.
    "mamba": MambaConfig(**SIZES, state_size=4),
}
ARCHITECTURES = (*FAMILIES, *OTHERS)
# What is never packed has one layout.
LAYOUTS = (
    *((name, "as it can") for name in ARCHITECTURES),
    *((name, "padded") for name in ARCHITECTURES if name not in ("bloom", "mamba")),
)
# Those that are packed when rows are longer than mistral's window.
PACKED = (*FAMILIES, "phi")


def causal_lm(name: str) -> PreTrainedModel:
    """A random model in evaluation mode; the same weights at every call."""
    if name not in OTHERS:
        return tiny_causal_lm(name).eval()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(OTHERS[name]).eval()


def language_model(name: str, *, value_head: bool = False) -> LanguageModel:
    """The same as kedge's policy; a value head gets random weights."""
    model = LanguageModel(causal_lm(name), tiny_tokenizer(), value_head=value_head)
    if model.value_head is not None:
        torch.nn.init.normal_(model.value_head.weight, generator=torch.Generator().manual_seed(0))
    return model
