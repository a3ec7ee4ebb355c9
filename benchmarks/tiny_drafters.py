"""Tiny drafter checkpoints in the layouts that other projects publish, with values that a formula gives.

`benchmarks/formats.py` compares what we make of them with what their original implementations gave.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

VOCAB, DRAFT_VOCAB, WIDTH, LAYERS = 40, 24, 32, 8
"""Of the target, whose hidden states and embeddings are of one width."""
HEADS, KEY_HEADS, SIZE, EXIT = 4, 2, 8, 48
PROMPT, TEXT = 12, 20
"""The drafter guesses behind the first of a text's tokens."""

Tensors = dict[str, Tensor]


def values(*shape: int, salt: int, scale: float = 1.0) -> Tensor:
    """Numbers between -scale and scale without a pattern; the same everywhere."""
    count = int(torch.Size(shape).numel())
    x = torch.sin(torch.arange(1, count + 1, dtype=torch.float64) * 12.9898 + salt * 78.233) * 43758.5453
    return (scale * (2 * (x - x.floor()) - 1)).float().view(shape)


def weights(shapes: dict[str, tuple[int, ...]], first: int = 1) -> Tensors:
    """Matrices whose products keep their scale; norms around 1."""
    made = {}
    for salt, (name, shape) in enumerate(shapes.items(), first):
        norm = len(shape) == 1 and "bias" not in name
        made[name] = (
            1 + values(*shape, salt=salt, scale=0.3) if norm else values(*shape, salt=salt, scale=2 * shape[-1] ** -0.5)
        )
    return made


@dataclass(frozen=True)
class TinyTarget:
    """What a drafter has to know of a target; it has embeddings alone."""

    name: str = "a tiny target"
    tokenizer: Any = None
    layer_count: int = LAYERS
    hidden_size: int = WIDTH
    vocab_size: int = VOCAB
    dtype: torch.dtype = torch.float32
    device = torch.device("cpu")

    @property
    def input_embedding(self) -> Any:
        return torch.nn.Embedding(VOCAB, WIDTH, _weight=values(VOCAB, WIDTH, salt=101))

    @property
    def output_embedding(self) -> Any:
        head = torch.nn.Linear(WIDTH, VOCAB, bias=False)
        head.weight = torch.nn.Parameter(values(VOCAB, WIDTH, salt=102, scale=0.35))
        return head


def text() -> Tensor:
    """(1, TEXT) token ids."""
    return (torch.arange(TEXT) * 17 + 5)[None] % VOCAB


def states(count: int) -> Tensor:
    """(1, TEXT, count · WIDTH) hidden states."""
    return values(1, TEXT, count * WIDTH, salt=103, scale=2.0)


@dataclass(frozen=True)
class Tiny:
    """A checkpoint in a published layout."""

    config: dict[str, Any]
    tensors: Tensors
    file: str = "model.safetensors"

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file({k: v.contiguous() for k, v in self.tensors.items()}, folder / self.file)
        return folder


def layer(prefix: str, reads: int = WIDTH, head_norms: bool = False) -> dict[str, tuple[int, ...]]:
    wide, narrow = HEADS * SIZE, KEY_HEADS * SIZE
    names: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (wide, reads),
        "self_attn.k_proj": (narrow, reads),
        "self_attn.v_proj": (narrow, reads),
        "self_attn.o_proj": (WIDTH, wide),
        "mlp.gate_proj": (EXIT, WIDTH),
        "mlp.up_proj": (EXIT, WIDTH),
        "mlp.down_proj": (WIDTH, EXIT),
        "input_layernorm": (WIDTH,),
        "post_attention_layernorm": (WIDTH,),
    }
    if head_norms:
        names |= {"self_attn.q_norm": (SIZE,), "self_attn.k_norm": (SIZE,)}
    return {f"{prefix}{name}.weight": shape for name, shape in names.items()}


LAYER_CONFIG: dict[str, Any] = {
    "hidden_size": WIDTH, "intermediate_size": EXIT, "num_attention_heads": HEADS, "num_key_value_heads": KEY_HEADS,
    "num_hidden_layers": 1, "rms_norm_eps": 1e-5, "vocab_size": VOCAB, "max_position_embeddings": 64,
    "hidden_act": "silu", "rope_theta": 5000.0,
}  # fmt: skip


def draft_tokens() -> Tensor:
    """(DRAFT_VOCAB,) the target's ids of the draft tokens, ascending, as trainers choose them."""
    return torch.arange(DRAFT_VOCAB) + torch.arange(DRAFT_VOCAB) * 16 // DRAFT_VOCAB


def vocabulary() -> Tensors:
    known = torch.zeros(VOCAB, dtype=torch.bool)
    known[draft_tokens()] = True
    return {"d2t": draft_tokens() - torch.arange(DRAFT_VOCAB), "t2d": known}


def _eagle_tensors(first: str, more: dict[str, tuple[int, ...]] | None = None) -> Tensors:
    shapes = {
        **layer(first, reads=2 * WIDTH),
        f"{first}hidden_norm.weight": (WIDTH,),
        "fc.weight": (WIDTH, 3 * WIDTH),
        "norm.weight": (WIDTH,),
        "lm_head.weight": (DRAFT_VOCAB, WIDTH),
        **(more or {}),
    }
    return weights(shapes) | vocabulary()


def eagle() -> Tiny:
    """As the authors of EAGLE-3 publish it."""
    config = LAYER_CONFIG | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT_VOCAB}
    return Tiny(config | {"model_type": "llama", "rope_scaling": None}, _eagle_tensors("midlayer."))


def specforge() -> Tiny:
    """SpecForge: three norms before the product, and Llama 3's rotary frequencies."""
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32}  # fmt: skip
    config = eagle().config | {"fc_norm": True, "norm_output": True, "rope_scaling": rope, "head_dim": SIZE}
    return Tiny(config, _eagle_tensors("midlayer.", {f"fc_norm.{i}.weight": (WIDTH,) for i in range(3)}))


def nvidia() -> Tiny:
    """NVIDIA: the layer by number, the hidden states inside `eagle_config`."""
    nested = {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True}
    config = LAYER_CONFIG | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT_VOCAB}
    return Tiny(config | {"eagle_config": nested}, _eagle_tensors("layers.0."))


def container(kind: str, tokens: int, described: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The configuration of `speculators`."""
    return {
        "architectures": [f"{kind.capitalize()}Speculator"],
        "speculators_model_type": kind,
        "speculators_version": "0.6.0",
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": None, "architectures": []},
        },
        "transformer_layer_config": described,
        "draft_vocab_size": DRAFT_VOCAB,
    } | more


def speculators_eagle3() -> Tiny:
    """Two layers, head norms, normalised residual and recycled state, one norm before the product, own embedding."""
    described = LAYER_CONFIG | {
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "head_dim": SIZE,
        "attention_bias": False,
    }
    config = container("eagle3", 3, described, norm_before_residual=True, norm_before_fc=True, norm_output=True,
                       fc_norm=False, eagle_aux_hidden_state_layer_ids=[2, 4, 5])  # fmt: skip
    more = {**layer("layers.1.", head_norms=True), "input_norm.weight": (3 * WIDTH,),
            "embed_tokens.weight": (VOCAB, WIDTH), "layers.0.self_attn.q_norm.weight": (SIZE,),
            "layers.0.self_attn.k_norm.weight": (SIZE,)}  # fmt: skip
    return Tiny(config, _eagle_tensors("layers.0.", more))


def _block_tensors(states: int, head_norms: bool = True, more: dict[str, tuple[int, ...]] | None = None) -> Tensors:
    shapes = {
        **layer("layers.0.", head_norms=head_norms),
        **layer("layers.1.", head_norms=head_norms),
        "fc.weight": (WIDTH, states * WIDTH),
        "hidden_norm.weight": (WIDTH,),
        "norm.weight": (WIDTH,),
        **(more or {}),
    }
    return weights(shapes)


BLOCK_CONFIG: dict[str, Any] = LAYER_CONFIG | {
    "model_type": "qwen3", "num_hidden_layers": 2, "head_dim": SIZE, "attention_bias": False,
    "layer_types": ["full_attention", "full_attention"],
}  # fmt: skip


def dflash(**nested: Any) -> Tiny:
    config = BLOCK_CONFIG | {"architectures": ["DFlashDraftModel"], "block_size": 5, "num_target_layers": LAYERS}
    said = {"mask_token_id": 39, "target_layer_ids": [1, 3, 5]} | nested
    return Tiny(config | {"dflash_config": said}, _block_tensors(3))


def jetspec() -> Tiny:
    """DFlash's layout, causal within the block."""
    return dflash(causal_head=True)


MARKOV: dict[str, dict[str, tuple[int, ...]]] = {
    "vanilla": {},
    "gated": {"markov_head.gate_proj.weight": (6, WIDTH + 6), "markov_head.gate_proj.bias": (6,)},
    "rnn": {"markov_head.joint_proj.weight": (18, WIDTH + 12), "markov_head.joint_proj.bias": (18,)},
}


def _markov(kind: str, guessable: int) -> dict[str, tuple[int, ...]]:
    known = {"markov_head.markov_w1.weight": (VOCAB, 6), "markov_head.markov_w2.weight": (guessable, 6)}
    confidence = {"confidence_head.proj.weight": (1, WIDTH + 6), "confidence_head.proj.bias": (1,)}
    return known | MARKOV[kind] | confidence


def dspark(kind: str = "gated") -> Tiny:
    """DeepSpec's layout, with an embedding and a head of its own."""
    config = BLOCK_CONFIG | {
        "architectures": ["Qwen3DSparkModel"], "block_size": 4, "num_target_layers": LAYERS, "mask_token_id": 39,
        "target_layer_ids": [1, 3, 5], "markov_rank": 6, "markov_head_type": kind, "num_anchors": 1,
        "enable_confidence_head": True, "confidence_head_with_markov": True,
    }  # fmt: skip
    own = {"embed_tokens.weight": (VOCAB, WIDTH), "lm_head.weight": (VOCAB, WIDTH)}
    return Tiny(config, _block_tensors(3, more=own | _markov(kind, VOCAB)))


OWN: dict[str, tuple[int, ...]] = {"lm_head.weight": (DRAFT_VOCAB, WIDTH), "embed_tokens.weight": (VOCAB, WIDTH)}


def dspark_rnn() -> Tiny:
    return dspark("rnn")


def speculators_dflash() -> Tiny:
    """A draft vocabulary, and a layer with a sliding window."""
    described = BLOCK_CONFIG | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5,
                                "use_sliding_window": True}  # fmt: skip
    config = container("dflash", 4, described, block_size=5, mask_token_id=39, aux_hidden_state_layer_ids=[2, 4, 6])
    return Tiny(config, _block_tensors(3, more=OWN) | vocabulary())


def speculators_dspark() -> Tiny:
    config = container("dspark", 4, BLOCK_CONFIG, block_size=4, mask_token_id=39, aux_hidden_state_layer_ids=[2, 4, 6],
                       markov_rank=6, markov_head_type="vanilla", sample_from_anchor=True)  # fmt: skip
    return Tiny(config, _block_tensors(3, more=OWN | _markov("vanilla", DRAFT_VOCAB)) | vocabulary())


MEDUSA_HEADS = 3


def medusa() -> Tiny:
    """As its authors publish it: a configuration that names fewer networks than there are."""
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "a tiny target"}
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(MEDUSA_HEADS):
        shapes |= {f"{head}.0.linear.weight": (WIDTH, WIDTH), f"{head}.0.linear.bias": (WIDTH,),
                   f"{head}.1.weight": (VOCAB, WIDTH)}  # fmt: skip
    return Tiny(config, weights(shapes), "medusa_lm_head.safetensors")


def vllm_medusa() -> Tiny:
    """vLLM's layout: two blocks without biases, and fewer tokens."""
    config = {"architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": WIDTH, "vocab_size": VOCAB,
              "truncated_vocab_size": DRAFT_VOCAB, "num_heads": MEDUSA_HEADS, "num_hidden_layers": 2}  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(MEDUSA_HEADS):
        shapes |= {f"blocks.{head}.layers.{block}.weight": (WIDTH, WIDTH) for block in range(2)}
        shapes[f"lm_heads.{head}.weight"] = (DRAFT_VOCAB, WIDTH)
    return Tiny(config, weights(shapes) | {"token_map": draft_tokens()})


EXPERTS, EXPERT, RANK, ROTARY, VALUE = 4, 12, 16, 4, 10
"""Experts and their width, the rank of latent attention, its rotary part, the width of its values."""


def _experts(prefix: str) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"gate.weight": (EXPERTS, WIDTH), "gate.e_score_correction_bias": (EXPERTS,)}
    for name in (*(f"experts.{i}" for i in range(EXPERTS)), "shared_experts"):
        shapes |= {f"{name}.gate_proj.weight": (EXPERT, WIDTH), f"{name}.up_proj.weight": (EXPERT, WIDTH),
                   f"{name}.down_proj.weight": (WIDTH, EXPERT)}  # fmt: skip
    return {f"{prefix}mlp.{name}": shape for name, shape in shapes.items()}


def deepseek_mtp() -> Tiny:
    """The module of DeepSeek-V3: latent attention and experts."""
    config = LAYER_CONFIG | {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_hidden_layers": LAYERS,
        "num_key_value_heads": HEADS, "num_nextn_predict_layers": 1, "n_routed_experts": EXPERTS, "n_group": 2,
        "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": EXPERT, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "q_lora_rank": RANK, "kv_lora_rank": RANK, "qk_nope_head_dim": SIZE,
        "qk_rope_head_dim": ROTARY, "v_head_dim": VALUE, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {
        "enorm.weight": (WIDTH,), "hnorm.weight": (WIDTH,), "eh_proj.weight": (WIDTH, 2 * WIDTH),
        "shared_head.norm.weight": (WIDTH,), "input_layernorm.weight": (WIDTH,),
        "post_attention_layernorm.weight": (WIDTH,), "self_attn.q_a_proj.weight": (RANK, WIDTH),
        "self_attn.q_a_layernorm.weight": (RANK,), "self_attn.q_b_proj.weight": (HEADS * (SIZE + ROTARY), RANK),
        "self_attn.kv_a_proj_with_mqa.weight": (RANK + ROTARY, WIDTH), "self_attn.kv_a_layernorm.weight": (RANK,),
        "self_attn.kv_b_proj.weight": (HEADS * (SIZE + VALUE), RANK),
        "self_attn.o_proj.weight": (WIDTH, HEADS * VALUE),
    }  # fmt: skip
    prefix = f"model.layers.{LAYERS}."
    return Tiny(config, weights({prefix + name: shape for name, shape in shapes.items()} | _experts(prefix)))


def glm_mtp() -> Tiny:
    """The module of GLM-4.5: grouped keys, half of each head turned, experts."""
    config = LAYER_CONFIG | {
        "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "num_hidden_layers": LAYERS,
        "num_nextn_predict_layers": 1, "n_routed_experts": EXPERTS, "n_group": 1, "topk_group": 1,
        "num_experts_per_tok": 2, "moe_intermediate_size": EXPERT, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "head_dim": SIZE, "use_qk_norm": True, "partial_rotary_factor": 0.5, "attention_bias": False,
        "routed_scaling_factor": 1.0, "norm_topk_prob": True,
    }  # fmt: skip
    prefix = f"model.layers.{LAYERS}."
    dense = {name: shape for name, shape in layer(prefix, head_norms=True).items() if ".mlp." not in name}
    beside: dict[str, tuple[int, ...]] = {
        f"{prefix}enorm.weight": (WIDTH,), f"{prefix}hnorm.weight": (WIDTH,),
        f"{prefix}eh_proj.weight": (WIDTH, 2 * WIDTH), f"{prefix}shared_head.norm.weight": (WIDTH,),
    }  # fmt: skip
    return Tiny(config, weights(dense | beside | _experts(prefix)))


def qwen_mtp() -> Tiny:
    """The module of Qwen3.5: gated attention, a quarter of each head turned, norms as differences from 1."""
    config = LAYER_CONFIG | {
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "num_hidden_layers": LAYERS,
        "head_dim": SIZE, "mtp_num_hidden_layers": 1, "attention_bias": False,
        "layer_types": ["linear_attention", "full_attention"] * (LAYERS // 2),
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.25},
    }  # fmt: skip
    shapes = layer("mtp.layers.0.", head_norms=True) | {
        "mtp.layers.0.self_attn.q_proj.weight": (2 * HEADS * SIZE, WIDTH), "mtp.fc.weight": (WIDTH, 2 * WIDTH),
        "mtp.pre_fc_norm_embedding.weight": (WIDTH,), "mtp.pre_fc_norm_hidden.weight": (WIDTH,),
        "mtp.norm.weight": (WIDTH,),
    }  # fmt: skip
    return Tiny(config, {k: v - 1 if v.dim() == 1 else v for k, v in weights(shapes).items()})


TINY: dict[str, Callable[[], Tiny]] = {
    "EAGLE-3, EAGLE": eagle,
    "EAGLE-3, SpecForge": specforge,
    "EAGLE-3, NVIDIA": nvidia,
    "EAGLE-3, speculators": speculators_eagle3,
    "DFlash": dflash,
    "DFlash, speculators": speculators_dflash,
    "DSpark": dspark,
    "DSpark, recurrent Markov head": dspark_rnn,
    "DSpark, speculators": speculators_dspark,
    "JetSpec": jetspec,
    "Medusa": medusa,
    "Medusa, vLLM": vllm_medusa,
}
"""Name of a format and its layout -> a checkpoint of it."""
MODULES: dict[str, Callable[[], Tiny]] = {
    "MTP, DeepSeek-V3": deepseek_mtp,
    "MTP, GLM-4.5": glm_mtp,
    "MTP, Qwen3.5": qwen_mtp,
}
"""The same for modules in a target's checkpoint, of which the rest is left out."""
