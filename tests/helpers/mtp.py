"""Tiny random checkpoints with an MTP module, in the layouts that models publish them in."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.helpers.hybrids import DELTA, QWEN_EXPERTS
from tests.helpers.zoo import COMMON

LAYERS = 2
"""Of the target; the module's layer is the one behind them."""
THREE = COMMON | {"num_hidden_layers": LAYERS + 1}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 2, "topk_group": 1}
HYBRID = DELTA | {"layer_types": ["linear_attention", "full_attention", "full_attention"]}

CONFIGS: dict[str, Callable[[], Any]] = {
    "deepseek-v3": lambda: tf.DeepseekV3Config(
        **THREE | {"num_key_value_heads": 4}, **EXPERTS, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8,
        qk_rope_head_dim=4, v_head_dim=10, first_k_dense_replace=1,
    ),
    "glm-4.5": lambda: tf.Glm4MoeConfig(**THREE, **EXPERTS, head_dim=8, first_k_dense_replace=1, use_qk_norm=True),
    "qwen3-next": lambda: tf.Qwen3NextConfig(**THREE, head_dim=8, **QWEN_EXPERTS, **HYBRID),
    "qwen3.5": lambda: tf.Qwen3_5TextConfig(**THREE, head_dim=8, **HYBRID),
    "qwen3.5-moe": lambda: tf.Qwen3_5MoeTextConfig(**THREE, head_dim=8, **QWEN_EXPERTS, **HYBRID),
}  # fmt: skip


def write(kind: str, folder: Path) -> Path:
    """A target of two layers with its module, weights large enough that texts vary."""
    torch.manual_seed(7)
    model = tf.AutoModelForCausalLM.from_config(CONFIGS[kind]())
    width = model.config.hidden_size
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    model.save_pretrained(folder)
    last = f"model.layers.{LAYERS}."
    beside = {
        "enorm": torch.rand(width) / 4,
        "hnorm": torch.rand(width) / 4,
        "eh_proj": 0.3 * torch.randn(width, 2 * width),
        "norm": torch.rand(width) / 4,
    }
    change(folder, lambda tensors: _with_module(tensors, beside, last, "qwen" in kind))
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = LAYERS
    for name in ("layer_types", "mlp_layer_types"):
        if config.get(name) is not None:
            config[name] = config[name][:LAYERS]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _with_module(tensors: dict[str, Tensor], beside: dict[str, Tensor], last: str, qwen: bool) -> dict[str, Tensor]:
    if qwen:
        moved = {name.replace(last, "mtp.layers.0."): tensor for name, tensor in tensors.items()}
        return moved | {
            "mtp.pre_fc_norm_embedding.weight": beside["enorm"],
            "mtp.pre_fc_norm_hidden.weight": beside["hnorm"],
            "mtp.fc.weight": beside["eh_proj"],
            "mtp.norm.weight": beside["norm"],
        }
    return tensors | {
        f"{last}enorm.weight": 1 + beside["enorm"],
        f"{last}hnorm.weight": 1 + beside["hnorm"],
        f"{last}eh_proj.weight": beside["eh_proj"],
        f"{last}shared_head.norm.weight": 1 + beside["norm"],
        f"{last}shared_head.head.weight": tensors["lm_head.weight"].clone(),
        f"{last}embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
    }


def change(folder: Path, how: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Rewrite the tensors of a folder."""
    path = folder / "model.safetensors"
    save_file(how(load_file(path)), path, metadata={"format": "pt"})
