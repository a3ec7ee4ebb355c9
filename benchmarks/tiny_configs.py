"""Tiny configurations of the causal LMs of transformers, from the names that configurations share.

A configuration class gets small sizes for the fields whose names are in SIZES; EXCEPTIONS has what a model type needs
besides. Models of them compute in fp64, with texts that vary.
"""

from typing import Any

import torch

VOCAB = 64
HIGHEST_WORD = 48
"""Tokens of prompts are below; the ids above are for images, sounds and other marks."""
LAYERS = 4  # the period of most models that mix kinds of layers
HIDDEN, HEADS, KV_HEADS, HEAD = 32, 4, 2, 8
WINDOW = 6  # of sliding windows and chunks: prompts are longer

NAMES = (
    (
        VOCAB,
        "vocab_size n_vocab decoder_vocab_size vocab_size_per_layer_input",
    ),
    (
        HIDDEN,
        "hidden_size n_embd d_model embed_dim embedding_size dim_model emb_dim input_embedding_size "
        "output_embedding_size attention_hidden_size lru_width word_embed_proj_dim embedding_dim "
        "backbone_hidden_size out_hidden_size dim_model_base",
    ),
    (
        LAYERS,
        "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers depth "
        "num_decoder_layers num_encoder_layers num_blocks",
    ),
    (
        HEADS,
        "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads "
        "encoder_attention_heads num_decoder_attention_heads num_encoder_attention_heads "
        "swa_num_attention_heads",
    ),
    (
        KV_HEADS,
        "num_key_value_heads num_kv_heads kv_n_heads num_query_groups swa_num_key_value_heads",
    ),
    (
        HEAD,
        "head_dim d_head dim_head kv_channels attention_head_size qk_nope_head_dim qk_rope_head_dim "
        "v_head_dim global_head_dim swa_head_dim linear_key_head_dim linear_value_head_dim "
        "linear_head_dim mamba_d_head mamba_head_dim mamba_headdim mamba_d_state ssm_state_size "
        "chunk_size mamba_chunk_size hidden_size_per_layer_input laurel_rank query_pre_attn_scalar "
        "state_size mamba_dt_rank time_step_rank gated_norm_rank adapter_rank d_rel o_lora_rank "
        "router_hidden_size",
    ),
    (
        48,
        "intermediate_size n_inner moe_intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim dim_ff "
        "dff ffn_hidden_size shared_expert_intermediate_size shared_intermediate_size "
        "intermediate_size_mlp d_inner feed_forward_size expert_ffn_hidden_size dense_intermediate_size "
        "moe_shared_expert_intermediate_size",
    ),
    (
        4,
        "num_experts n_routed_experts num_local_experts moe_num_experts linear_num_value_heads",
    ),
    (
        2,
        "num_experts_per_tok num_experts_per_token moe_topk moe_top_k moe_k linear_num_key_heads "
        "n_groups mamba_n_groups mamba_ngroups o_groups mamba_num_groups",
    ),
    (
        8,
        "mamba_n_heads mamba_num_heads index_block_size",
    ),
    (
        16,
        "kv_lora_rank q_lora_rank index_head_dim qk_head_dim index_n_heads",
    ),
    (
        1,
        "n_group topk_group num_expert_group pretraining_tp num_dense_layers first_k_dense_replace",
    ),
    (
        WINDOW,
        "sliding_window sliding_window_size attention_window_size window_size attention_chunk_size local_attention",
    ),
    (
        5,
        "index_topk",
    ),
    (
        128,
        "max_position_embeddings n_positions n_ctx max_seq_len model_max_length max_target_positions "
        "context_length max_source_positions",
    ),
)
SIZES = {name: size for size, names in NAMES for name in names.split()}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
IF_NONE = ("head_dim", "num_key_value_heads", "n_routed_experts", "num_experts_per_tok")
"""Fields that small models need where the default is None: it would be computed from larger sizes."""
MAMBA = {"mamba_d_ssm": 64, "mamba_n_heads": 8}
SLIDING = ["sliding_attention", "full_attention"] * 2
CONV = ["conv", "full_attention"] * 2
SHARED = ["linear_attention", "hybrid"] * 2
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}

EXCEPTIONS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "codegen": {"rotary_dim": 4},
    "cohere_compass_text": {"rope_parameters": {"full_attention": MROPE}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "dots1": {"n_shared_experts": 1, "num_local_experts": 4, "layer_types": SLIDING},
    "falcon_h1": MAMBA,
    "gemma3n_text": {
        "num_kv_shared_layers": 2,
        "layer_types": SLIDING,
        "intermediate_size": 48,
        "activation_sparsity_pattern": [0.5, 0.0] * 2,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "got_ocr2": {"vision_config": {"output_channels": 16, "mlp_dim": 48, "image_size": 64, "global_attn_indexes": [1]}},
    "gptj": {"rotary_dim": 4},
    "granite": {"residual_multiplier": 0.5, "embedding_multiplier": 2.0, "logits_scaling": 2.0},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": CONV},
    "lfm2_moe": {"layer_types": CONV},
    "llama4_text": {"floor_scale": 4},  # at 8192, no prompt here would be long enough to see it
    "llama4_vision_model": {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
    "longcat_flash": {"num_layers": 2, "zero_expert_num": 2},
    "mamba2": {"num_heads": 8},
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "qwen2_5_vl_text": {"rope_parameters": MROPE},
    "qwen2_vl_text": {"rope_parameters": MROPE},
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "lsh"], "num_hidden_layers": 2, "num_buckets": 2},
    "xlstm": {"num_blocks": 4, "hidden_size": 64, "embedding_dim": 64},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": SHARED,
        "attention_hidden_size": 64, "attention_head_dim": 16, "n_mamba_heads": 2, "mamba_dt_rank": 4},
    "zamba2": {"layers_block_type": SHARED,
        "attention_hidden_size": 64, "attention_head_dim": 16, "n_mamba_heads": 8, "mamba_headdim": 8},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


def tiny_kwargs(config_class: Any) -> dict[str, Any]:
    """Arguments for small sizes, for a configuration and those in it."""
    from transformers import CONFIG_MAPPING

    fields = config_class().to_dict()
    made: dict[str, Any] = {}
    free = VOCAB - 1
    for name, value in fields.items():
        if name in TOKENS:
            made[name] = TOKENS[name]
        elif name in SIZES and not isinstance(value, list | dict) and (value is not None or name in IF_NONE):
            made[name] = SIZES[name]
        elif name.endswith(("token_id", "token_index")) and isinstance(value, int) and value >= HIGHEST_WORD:
            made[name], free = free, max(free - 1, HIGHEST_WORD)
    kinds = list(dict.fromkeys(fields.get("layer_types") or []))
    if len(kinds) > 1:  # all kinds of layers in a few layers
        made["layer_types"] = (kinds * LAYERS)[:LAYERS]
    if "kv_lora_rank" in fields:  # such keys are one for each head
        made["num_key_value_heads"] = HEADS
    if "is_decoder" in fields:
        made["is_decoder"] = True
    for name, part in getattr(config_class, "sub_configs", {}).items():
        if isinstance(inner := fields.get(name), dict):
            kind = inner["model_type"]
            if kind in CONFIG_MAPPING:  # its `get` knows only what was imported before
                part = CONFIG_MAPPING[kind]
            made[name] = {"model_type": kind} | tiny_kwargs(part)
    return merged(made, EXCEPTIONS.get(config_class.model_type, {}))


def tiny_config(model_type: str) -> Any:
    from transformers import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[model_type]
    return config_class(**tiny_kwargs(config_class))


def merged(sizes: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Arguments with changes; those of a configuration inside are merged too."""
    both = {
        k: merged(sizes[k], v) for k, v in changes.items() if isinstance(v, dict) and isinstance(sizes.get(k), dict)
    }
    return sizes | changes | both


def tiny_model(model_type: str, dtype: torch.dtype, loader: Any = None) -> Any:
    """Random weights, large enough that texts vary; the same each time. loader: `AutoModelForCausalLM` or another."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(7)
    model = (loader or AutoModelForCausalLM).from_config(tiny_config(model_type)).to(dtype).eval()
    model.generation_config.eos_token_id = None
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the fused ones have no fp64
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    return model
