"""Checks a GGUF file's metadata: an entry that transformers ignores would change the model, and is rejected.

Sources: the specification of GGUF by ggml, and llama.cpp for the meaning of entries and for the defaults.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from kedge_base.errors import ModelError

ADVICE = "which transformers does not read from GGUF files; use the original model"

HARMLESS = re.compile(
    r"tokenizer\.(chat_template.*|huggingface\.json|ggml\.(model|pre|tokens|scores|merges|token_type(_count)?"
    r"|\w+_token_ids?|add_(bos|eos)_token|add_space_prefix|precompiled_charsmap|suppress_tokens))|block_count"
    r"|attention\.relative_buckets_count|context_length|decoder_\w+|embedding_length|(expert_(shared_)?)?feed_forward_length"
    r"|full_attention_interval|rope\.dimension_sections|rope\.scaling\.(finetuned|original_context_length)"
    r"|nextn_predict_layers|shortconv\.l_cache|ssm\.(conv_kernel|group_count|inner_size|state_size|time_step_rank)|tensor_data_layout"
)
"""Entries that are always read, that the tensors' shapes confirm, or that do not affect results."""

FOLLOWED = """
attention.causal=1
attention.clamp_kqv=0
attention.head_count={num_attention_heads:g} attention.head_count={n_head:g}
attention.head_count_kv={num_key_value_heads:g} attention.head_count_kv={n_head:g}
attention.key_length={width:g}
attention.layer_norm_epsilon={rms_norm_eps:g}
attention.layer_norm_epsilon={layer_norm_eps:g}
attention.layer_norm_epsilon={norm_eps:g}
attention.layer_norm_epsilon={layer_norm_epsilon:g} attention.layer_norm_epsilon={norm_epsilon:g}
attention.layer_norm_rms_epsilon={rms_norm_eps:g}
attention.layer_norm_rms_epsilon={layer_norm_eps:g}
attention.layer_norm_rms_epsilon={norm_eps:g}
attention.layer_norm_rms_epsilon={layer_norm_epsilon:g} attention.layer_norm_rms_epsilon={norm_epsilon:g}
attention.sliding_window={sliding_window:g}
attention.value_length={width:g}
attn_logit_softcapping={attn_logit_softcapping:g}
embedding_scale=0 embedding_scale=1
expert_count={num_local_experts:g} expert_count={num_experts:g}
expert_gating_func=0 expert_gating_func=1
expert_used_count={num_experts_per_tok:g}
expert_weights_norm={norm_topk_prob:g}
expert_weights_scale=0 expert_weights_scale=1
final_logit_softcapping={final_logit_softcapping:g}
logit_scale=0 logit_scale=1
residual_scale=0 residual_scale=1
rope.dimension_count={rotated:g}
rope.freq_base={theta:g}
rope.freq_base_swa={local_theta:g}
rope.scale_linear=0 rope.scale_linear=1
rope.scaling.attn_factor=0 rope.scaling.attn_factor=1
rope.scaling.factor=0 rope.scaling.factor=1
rope.scaling.type=none rope.scaling.type=linear
ssm.dt_b_c_rms=0
use_parallel_residual={use_parallel_residual:g} use_parallel_residual={parallel_attn:g}
vocab_size={tokens:g}
"""
"""Entries of an architecture, with the values that the model uses: attributes of its configuration, or 0."""


def check_kind(stated: Mapping[str, Any]) -> None:
    """Reject a file that does not contain a full model.

    Raises:
        ModelError: It is an adapter, a different kind of file, or one part of several.
    """
    if (kind := stated.get("general.type", "model")) != "model":
        raise ModelError(f"its general.type is {kind}; expected a model (kedge reads adapters in PEFT's format alone)")
    if (parts := stated.get("split.count", 1)) > 1:
        raise ModelError(f"it is one of {parts} parts; join them first: llama-gguf-split --merge FIRST.gguf ALL.gguf")


def complete_config(stated: Mapping[str, Any], config: Any) -> None:
    """Set the rotary base and the attention window, which transformers leaves at its classes' defaults."""
    architecture = stated["general.architecture"]
    rope = getattr(config, "rope_parameters", None) or {}
    if "rope_theta" in rope:
        rope["rope_theta"] = stated.get(f"{architecture}.rope.freq_base", 10_000.0)
    if config.model_type in ("mistral", "phi3", "starcoder2"):
        config.sliding_window = stated.get(f"{architecture}.attention.sliding_window") or None


def check_metadata(stated: Mapping[str, Any], config: Any, *, num_tokens: int) -> None:
    """Reject a file with an entry that the model ignores, or that is unknown.

    Args:
        stated: The file's entries.
        config: The configuration of the model that was read from it.
        num_tokens: Tokens of its tokenizer.

    Raises:
        ModelError: There is such an entry.
    """
    prefix = f"{stated['general.architecture']}."
    followed = FOLLOWED.format_map(_facts(config, num_tokens)).split()
    for name, value in stated.items():
        short = name.removeprefix(prefix)
        number = max(value) if short.endswith("head_count_kv") and isinstance(value, list) else value
        text = f"{number:g}" if isinstance(number, (int, float)) else str(number)
        is_known = HARMLESS.fullmatch(short) or (short.startswith("rope.scal") and is_scaled(config))
        if short == "attention.sliding_window" and value >= stated[f"{prefix}context_length"]:
            continue  # the window covers the whole context
        if name.startswith((prefix, "tokenizer.")) and not is_known and f"{short}={text}" not in followed:
            raise ModelError(f"it has {name}={text:.60}, {ADVICE}")


def _facts(config: Any, num_tokens: int) -> defaultdict[str, float]:
    """The numbers in a configuration, and some derived from them, by name."""
    own = {**vars(config), "tokens": num_tokens}
    rope = own.get("rope_parameters") or {}
    full = rope.get("full_attention", rope)
    own["width"] = own.get("head_dim") or config.hidden_size // getattr(config, "num_attention_heads", 1)
    own["rotated"] = int(own["width"] * full.get("partial_rotary_factor", 1))
    own["theta"] = full.get("rope_theta")
    own["local_theta"] = rope.get("sliding_attention", rope).get("rope_theta")
    return defaultdict(int, {name: value for name, value in own.items() if isinstance(value, (int, float))})


def is_scaled(config: Any) -> bool:
    """True if transformers has read a scaling of the rotary embeddings."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(each for each in rope.values() if isinstance(each, dict))]
    return any(each.get("rope_type", "default") != "default" for each in kinds)
