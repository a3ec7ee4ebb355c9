"""Small random models of the families that keep a recurrent state."""

from collections.abc import Callable
from typing import Any

import torch
import transformers as tf

from redrafter.targets import Target, load_target
from tests.helpers.zoo import COMMON, VOCAB

ALTERNATE = {"layer_types": ["linear_attention", "full_attention"]}
FOUR = COMMON | {"num_hidden_layers": 4}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
} | ALTERNATE
QWEN_EXPERTS = EXPERTS | {"shared_expert_intermediate_size": 24}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_n_groups": 2, "mamba_chunk_size": 16}
ZAMBA = {"mamba_d_state": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2}
PURE = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
ENDLESS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
# transformers' single steps of these two families have no least time step, passes of many tokens do.
NO_LIMIT = {"time_step_min": 1e-12}

CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen3-next": lambda: tf.Qwen3NextConfig(**COMMON, head_dim=8, **QWEN_EXPERTS, **DELTA),
    "qwen3.5": lambda: tf.Qwen3_5TextConfig(**COMMON, head_dim=8, **DELTA),
    "qwen3.5-moe": lambda: tf.Qwen3_5MoeTextConfig(**COMMON, head_dim=8, **QWEN_EXPERTS, **DELTA),
    "olmo-hybrid": lambda: tf.OlmoHybridConfig(**COMMON, **DELTA),
    "kimi-linear": lambda: tf.KimiLinearConfig(
        **COMMON | {"num_key_value_heads": 4}, head_dim=8, linear_num_heads=4, linear_head_dim=8, kv_lora_rank=8,
        q_lora_rank=None, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, num_experts=4,
        num_experts_per_token=2, moe_intermediate_size=24, **ALTERNATE,
    ),
    "mamba2": lambda: tf.Mamba2Config(**PURE, **ENDLESS, num_heads=8, head_dim=8, n_groups=2, chunk_size=16),
    "bamba": lambda: tf.BambaConfig(**COMMON, attn_layer_indices=[1], **MAMBA2),
    "granite4": lambda: tf.GraniteMoeHybridConfig(
        **COMMON, num_local_experts=0, shared_intermediate_size=32, **MAMBA2, **ALTERNATE
    ),
    "granite4-moe": lambda: tf.GraniteMoeHybridConfig(
        **COMMON, num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=32, **MAMBA2, **ALTERNATE
    ),
    "falcon-h1": lambda: tf.FalconH1Config(**COMMON, head_dim=8, mamba_d_ssm=64, **MAMBA2),
    "zamba2": lambda: tf.Zamba2Config(
        **FOUR, n_mamba_heads=8, mamba_headdim=8, mamba_ngroups=2, chunk_size=16, num_mem_blocks=1, **ZAMBA, **NO_LIMIT
    ),
    "nemotron-h": lambda: tf.NemotronHConfig(
        **FOUR, head_dim=8, layers_block_type=["linear_attention", "mlp", "full_attention", "moe"], mamba_num_heads=8,
        mamba_head_dim=8, ssm_state_size=4, n_groups=2, chunk_size=16, n_routed_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=24, moe_shared_expert_intermediate_size=24, **NO_LIMIT,
    ),
    "jamba": lambda: tf.JambaConfig(
        **COMMON, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1,
        num_experts=4, num_experts_per_tok=2, mamba_d_state=4, mamba_dt_rank=4,
    ),
    "mamba": lambda: tf.MambaConfig(**PURE, **ENDLESS),
    "falcon-mamba": lambda: tf.FalconMambaConfig(**PURE, **ENDLESS),
    "zamba": lambda: tf.ZambaConfig(**FOUR, n_mamba_heads=2, **ZAMBA),
    "lfm2": lambda: tf.Lfm2Config(**COMMON, layer_types=["conv", "full_attention"], conv_L_cache=3),
    "lfm2-moe": lambda: tf.Lfm2MoeConfig(
        **COMMON, layer_types=["conv", "full_attention"], conv_L_cache=3, num_dense_layers=1, **EXPERTS
    ),
    "minimax": lambda: tf.MiniMaxConfig(
        **COMMON, head_dim=8, block_size=8, num_local_experts=4, num_experts_per_tok=2, **ALTERNATE
    ),
    "zaya": lambda: tf.ZayaConfig(**COMMON, head_dim=8, num_experts=4, moe_intermediate_size=24),
}  # fmt: skip

_made: dict[str, Target] = {}


def hybrid_model(kind: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """Weights large enough that texts vary; the same each time."""
    config = CONFIGS[kind]()
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(7)
    model = tf.AutoModelForCausalLM.from_config(config).to(dtype).eval()
    if any("experts" in name for name, _ in model.named_modules()):
        model.set_experts_implementation("eager")  # the fused ones have no fp64
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    return model


def hybrid(kind: str) -> Target:
    """A checked target in fp64, made once."""
    if kind not in _made:
        _made[kind] = load_target(hybrid_model(kind))
    return _made[kind]
