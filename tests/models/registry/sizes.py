"""Tiny sizes for transformers' configurations, by the field's name."""

from __future__ import annotations

from typing import Any

VOCABULARY = 96
WORDS = 92
BOS, EOS, PAD = 1, 2, 3  # 0 is a word, so that a pad of 0 shows
WIDTH, INNER, LAYERS = 32, 48, 4
HEADS, KEY_HEADS, HEAD_WIDTH, RANK = 4, 2, 8, 16
EXPERTS, CHOSEN_EXPERTS = 4, 2
# All shorter than the rows, so that what changes at such a length shows.
WINDOW, BLOCK, STATE = 6, 4, 4
CONTEXT = 128

_BY_SIZE: tuple[tuple[int, str], ...] = (
    (VOCABULARY, "vocab_size unpadded_vocab_size vocab_size_per_layer_input decoder_vocab_size entity_vocab_size"),
    (
        WIDTH,
        "hidden_size n_embd d_model dim emb_dim embedding_size embedding_dim attention_hidden_size "
        "word_embed_proj_dim input_embedding_size output_embedding_size lru_width xpath_unit_hidden_size "
        "entity_emb_size pronunciation_embed_dim shape_embed_dim router_hidden_size prediction_head_size "
        "backbone_hidden_size d_latents adapter_in_dim adapter_input_size adapter_out_dim out_hidden_size "
        "hidden_size_global",
    ),
    (
        INNER,
        "intermediate_size ffn_dim d_ff dff dim_ff d_inner hidden_dim n_inner feed_forward_size "
        "ffn_hidden_size expert_ffn_hidden_size decoder_ffn_dim encoder_ffn_dim moe_intermediate_size "
        "shared_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size "
        "moe_shared_expert_intermediate_size intermediate_size_mlp dense_intermediate_size "
        "prefix_dense_intermediate_size",
    ),
    (
        LAYERS,
        "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers "
        "num_encoder_layers num_blocks",
    ),
    (
        HEADS,
        "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads "
        "attention_heads linear_num_heads num_decoder_attention_heads num_encoder_attention_heads "
        "num_self_attention_heads num_cross_attention_heads swa_num_attention_heads linear_num_value_heads",
    ),
    (KEY_HEADS, "num_key_value_heads num_kv_heads swa_num_key_value_heads linear_num_key_heads"),
    (
        HEAD_WIDTH,
        "head_dim swa_head_dim attention_head_size d_head dim_head d_kv kv_channels linear_head_dim "
        "linear_key_head_dim linear_value_head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim "
        "index_head_dim query_pre_attn_scalar rotary_dim mamba_d_head mamba_head_dim",
    ),
    (RANK, "q_lora_rank kv_lora_rank o_lora_rank gated_norm_rank laurel_rank adapter_rank"),
    (
        CONTEXT,
        "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions context_length "
        "max_2d_position_embeddings",
    ),
    (
        WINDOW,
        "sliding_window attention_chunk_size attention_window_size sliding_window_size local_attention "
        "window_size local_attention_window_len keep_window_size",
    ),
    (BLOCK, "index_topk chunk_size mamba_chunk_size block_size"),
    (STATE, "state_size mamba_d_state ssm_state_size time_step_rank mamba_dt_rank hc_mult hc_count"),
    (
        EXPERTS,
        "num_experts n_routed_experts num_local_experts moe_num_experts num_hash_functions num_hash_buckets",
    ),
    (CHOSEN_EXPERTS, "num_experts_per_tok moe_topk moe_k top_k_experts"),
    (
        1,
        "n_group topk_group n_shared_experts num_shared_experts moe_num_shared_experts first_k_dense_replace "
        "num_dense_layers moe_layer_start_index n_groups mamba_n_groups mamba_ngroups zero_expert_num "
        "num_nextn_predict_layers H_cycles num_hidden_groups",
    ),
)
SIZES: dict[str, Any] = {
    **{name: size for size, names in _BY_SIZE for name in names.split()},
    "bos_token_id": BOS,
    "cls_token_id": BOS,
    "decoder_start_token_id": BOS,
    "eos_token_id": EOS,
    "sep_token_id": EOS,
    "pad_token_id": PAD,
    # A key's score is a sum over these heads of what is above 0: with few of them, keys tie at 0 and any may be chosen.
    "index_n_heads": 32,
    "type_vocab_size": 2,
    "image_size": 16,
    "patch_size": 8,
    "num_channels": 3,
    # Not sizes: noise and factors are on, so that forgetting one shows.
    "router_jitter_noise": 0.1,
    "input_jitter_noise": 0.1,
    "lm_head_bias": True,
    "lm_head_multiplier": 0.7,
    "logits_scaling": 1.5,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.3,
    "key_multiplier": 0.7,
    "attention_in_multiplier": 0.7,
    "attention_out_multiplier": 0.8,
    "ssm_in_multiplier": 0.7,
    "ssm_out_multiplier": 0.8,
}
