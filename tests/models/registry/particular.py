"""What single architectures need besides `sizes`, variants of some, and those that cannot be built."""

from __future__ import annotations

from typing import Any

from tests.models.registry.sizes import HEADS, INNER, WIDTH

# Sizes that the field's name does not determine, and those that an architecture's checks require.
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 8, "attn_layer_indices": [1, 3]},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "canine": {"type_vocab_size": 16, "num_hash_functions": 8, "local_transformer_stride": 4},
    "cohere": {"logit_scale": 1.5},
    "cohere2": {"logit_scale": 1.5},
    "cohere2_moe": {"logit_scale": 1.5},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": None,
        },
    },
    "dbrx": {
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 4.0},
        "ffn_config": {"moe_jitter_eps": 0.1, "moe_top_k": 2, "ffn_hidden_size": INNER},
    },
    "deepseek_v4": {
        "num_key_value_heads": 1,
        "index_topk": 2,
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
    },
    "diffllama": {"attention_dropout": 0.0},
    "dots3_note_text": {
        "head_dim": 16,
        "swa_num_attention_heads": HEADS,
        "swa_num_key_value_heads": HEADS,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 8,
    },
    "dots1": {"layer_types": ["full_attention", "sliding_attention"] * 2},
    "esmc": {"num_key_value_heads": HEADS},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8},
    "gemma3n_text": {"num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0]},
    "granitemoehybrid": {"mamba_n_heads": 8, "layer_types": ["linear_attention", "full_attention"] * 2},
    "inkling2_text": {"rel_extent": 8, "log_scaling_n_floor": 4, "n_layers_per_attn_res_block": 2},
    "inkling_text": {
        "logits_mup_width_multiplier": 2.0,
        "unpadded_vocab_size": 93,
        "rel_extent": 8,
        "log_scaling_n_floor": 4,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "laguna": {"layer_types": ["full_attention", "sliding_attention"] * 2},
    "layoutlmv3": {"coordinate_size": 4, "shape_size": 8, "visual_embed": False, "input_size": 16, "patch_size": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm3": {"layer_types": ["conv", "sliding_attention", "conv", "full_attention"]},
    "lilt": {"hidden_size": 48, "channel_shrink_ratio": 2},
    "llama4_text": {"floor_scale": 4, "no_rope_layers": [1, 0, 1, 0]},
    "mamba2": {"num_heads": 8},
    "mellum": {"layer_types": ["full_attention", "sliding_attention"] * 2},
    "minicpm3": {"dim_model_base": WIDTH},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "index_n_heads": 2,
        "index_block_size": 2,
        "index_topk_blocks": 2,
    },
    "mobilebert": {"num_feedforward_networks": 2},
    "nemotron_h": {"mamba_num_heads": 8},
    "qwen4_exp_text": {
        "indexer_n_heads": 32,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "ple_layer_ids": [1],
        "ple_embed_dim": 16,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 64,
        "make_ngram_vocab_size_divisible_by": 4,
        "split_ngram_parts": 1,
    },
    "reformer": {
        "axial_pos_shape": (8, 16),
        "axial_pos_embds_dim": (16, 16),
        "attn_layers": ("local", "lsh", "local", "lsh"),
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "num_buckets": 4,
    },
    "t5": {"decoder_start_token_id": 0},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 64, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}

# Settings that change how a row is read, of architectures that are also built without them.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert (not a decoder)": ("bert", {"is_decoder": False}),
    "falcon (ALiBi)": ("falcon", {"alibi": True}),
    "falcon (new decoder)": ("falcon", {"new_decoder_architecture": True}),
    "gpt2 (scaled by layer)": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "llama (dynamic RoPE)": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 1e4,
                "factor": 4.0,
            },
            "max_position_embeddings": 16,
        },
    ),
    "llama (tied)": ("llama", {"tie_word_embeddings": True}),
    "llama (YaRN)": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 8,
            }
        },
    ),
    "opt (post-norm)": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 16}),
    "phi3 (longrope)": (
        "phi3",
        {
            "sliding_window": None,
            "original_max_position_embeddings": 8,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 4,
                "long_factor": [4.0] * 4,
                "original_max_position_embeddings": 8,
            },
        },
    ),
    "qwen2 (window)": (
        "qwen2",
        {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"] * 2},
    ),
    "stablelm (parallel)": ("stablelm", {"use_parallel_residual": True, "qk_layernorm": True}),
}

UNBUILT = {
    "gemma3n": "its image tower needs the package timm",
    "gemma4_assistant": "a draft model: it reads the states of another model",
    "gemma4_unified_assistant": "a draft model: it reads the states of another model",
    "musicgen": "it writes audio codes, and transformers cannot build it as a language model",
    "musicgen_melody": "it writes audio codes, and transformers cannot build it as a language model",
}
UNBUILT_REWARDS = {
    "layoutlmv2": "it needs the package detectron2",
}
