"""A decoder's shape: from its config.json, or typical of its number of parameters."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from kedge_base.errors import ConfigError, ModelError

SUFFIXES: Final = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_SYNONYMS: Final = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "num_layers"),
    "num_attention_heads": ("n_head", "num_heads"),
    "intermediate_size": ("n_inner", "ffn_dim"),
}


@dataclass(frozen=True)
class ModelShape:
    """The properties that a model's costs depend on.

    Attributes:
        parameters: All weights.
        active: Weights that one token is multiplied with; fewer than `parameters` in a mixture of experts.
        layers: Transformer blocks.
        hidden: Width of the residual stream.
        kv_heads: Heads of keys and values.
        head_dim: Width of a head.
        vocabulary: Rows of the embedding.
        origin: Where the shape is from, for the report.
    """

    parameters: float
    active: float
    layers: int
    hidden: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    origin: str = ""

    @property
    def key_value_bytes(self) -> int:
        """Keys and values of one token in bf16."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim

    @property
    def is_mixture(self) -> bool:
        """True if a token uses only some of the weights."""
        return self.active < self.parameters


# Published models of each size: parameters, layers, hidden, heads of keys and values, width of a head, vocabulary.
_TYPICAL: Final = (
    (0.494e9, 24, 896, 2, 64, 151936, "Qwen2.5-0.5B"),
    (1.54e9, 28, 1536, 2, 128, 151936, "Qwen2.5-1.5B"),
    (3.09e9, 36, 2048, 2, 128, 151936, "Qwen2.5-3B"),
    (8.03e9, 32, 4096, 8, 128, 128256, "Llama-3.1-8B"),
    (14.8e9, 48, 5120, 8, 128, 152064, "Qwen2.5-14B"),
    (32.8e9, 64, 5120, 8, 128, 151936, "Qwen3-32B"),
    (70.6e9, 80, 8192, 8, 128, 128256, "Llama-3.1-70B"),
    (405e9, 126, 16384, 8, 128, 128256, "Llama-3.1-405B"),
)


def parse_parameters(text: str) -> float:
    """The number in `7B`, `1.5b` or `7000000000`.

    Raises:
        ConfigError: The text is no such number, or not between 1 million and 10 trillion.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMBT]?)", text.strip().upper())
    number = float(match[1]) * SUFFIXES.get(match[2], 1.0) if match else 0.0
    if not 1e6 <= number <= 1e13:
        raise ConfigError(f"a number of parameters is written 7B, 1.5B or 350M, from 1M to 10T; it is {text!r}")
    return number


def typical_shape(parameters: float) -> ModelShape:
    """A dense model of this size, with the proportions of the published model nearest in size."""
    nearest = min(_TYPICAL, key=lambda row: abs(math.log(row[0] / parameters)))
    _, layers, hidden, kv_heads, head_dim, vocabulary, name = nearest
    return ModelShape(parameters, parameters, layers, hidden, kv_heads, head_dim, vocabulary, f"shaped like {name}")


def read_shape(path: str | Path) -> ModelShape:
    """The shape that a config.json, or the one in a model's folder, describes.

    Raises:
        ModelError: There is no such file, it is damaged, or an entry is missing.
    """
    file = Path(path).expanduser()
    file = file / "config.json" if file.is_dir() else file
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not JSON"
        raise ModelError(f"{file}: {reason}; --model is a folder with a config.json, or that file") from error
    if not isinstance(entries, dict):
        raise ModelError(f"{file}: not a JSON object")
    # Models that also see images keep the decoder's entries in a section.
    text = entries.get("text_config")
    return replace(_shape(text if isinstance(text, dict) else entries, file), origin=str(path))


class _Entries:
    """The entries of a config.json, checked as they are read."""

    def __init__(self, entries: Mapping[str, Any], file: Path) -> None:
        self.entries = entries
        self.file = file

    def number(self, name: str, default: int | None = None) -> int:
        """The entry of this name or one of its synonyms.

        Raises:
            ModelError: It is no positive number, or missing without a default.
        """
        found = [self.entries[key] for key in (name, *_SYNONYMS.get(name, ())) if self.entries.get(key) is not None]
        value = found[0] if found else default
        if isinstance(value, bool) or not isinstance(value, int) or value < min(1, 1 if default is None else default):
            raise ModelError(f"{self.file}: {name} is {'missing' if value is None else repr(value)}")
        return value


def _shape(entries: Mapping[str, Any], file: Path) -> ModelShape:
    number = _Entries(entries, file).number
    hidden = number("hidden_size")
    layers = number("num_hidden_layers")
    heads = number("num_attention_heads")
    kv_heads = number("num_key_value_heads", heads)
    head_dim = number("head_dim", max(1, hidden // heads))
    vocabulary = number("vocab_size")
    old = "n_embd" in entries or "ffn_dim" in entries
    embeddings = vocabulary * hidden * (1 if entries.get("tie_word_embeddings", "n_embd" in entries) else 2)
    attention = layers * 2 * hidden * head_dim * (heads + kv_heads)
    if "kv_lora_rank" in entries:
        # Latent attention keeps one compressed vector per token, and one for positions, instead of keys and values.
        kv_heads = 1
        head_dim = (number("kv_lora_rank") + number("qk_rope_head_dim", 64)) // 2
    total, active = _feed_forward(_Entries(entries, file), layers, hidden, matrices=2 if old else 3)
    fixed = embeddings + attention
    return ModelShape(fixed + total, fixed + active, layers, hidden, kv_heads, head_dim, vocabulary, str(file))


def _feed_forward(entries: _Entries, layers: int, hidden: int, *, matrices: int) -> tuple[int, int]:
    """Weights of all feed-forward blocks, and the ones that one token uses.

    Args:
        entries: The config.json.
        layers: Transformer blocks.
        hidden: Width.
        matrices: Three today (gate, up and down), two in GPT-2's time.
    """
    wide = entries.number("intermediate_size", 4 * hidden)
    names = [name for name in ("num_experts", "num_local_experts", "n_routed_experts") if entries.entries.get(name)]
    if not names:
        every = layers * matrices * hidden * wide
        return every, every
    experts = entries.number(names[0])
    used = entries.number("num_experts_per_tok")
    expert = matrices * hidden * entries.number("moe_intermediate_size", wide)
    always = entries.number("n_shared_experts", 0) * expert + hidden * experts
    always += matrices * hidden * entries.number("shared_expert_intermediate_size", 0)
    # The first blocks of some mixtures are dense.
    dense = entries.number("first_k_dense_replace", 0)
    first = dense * matrices * hidden * wide
    rest = layers - dense
    return first + rest * (experts * expert + always), first + rest * (used * expert + always)
