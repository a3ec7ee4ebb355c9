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

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file({k: v.contiguous() for k, v in self.tensors.items()}, folder / "model.safetensors")
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
}
"""Name of a format and its layout -> a checkpoint of it."""
