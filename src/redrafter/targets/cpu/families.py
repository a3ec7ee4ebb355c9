"""Which models the CPU's compiled pass runs: sizes, layers and rotary embeddings from a transformers config."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from redrafter.errors import UnsupportedTarget
from redrafter.kernels.cpu_pass.model import GELU, SILU, Sizes
from redrafter.targets.attention import FULL, SLIDING

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")
"""Model types in transformers' words."""
GATES = {"silu": SILU, "gelu_pytorch_tanh": GELU}
ROTATIONS = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings that depend on the position alone."""
PIECE = 4096
"""Positions whose rotations are computed at once. Pieces of one size give a position the same bits in every table."""

Tables = list[tuple[Tensor, Tensor]]
"""Cosines and sines (positions, head size / 2) of each kind of layer."""


def why_not(config: Any) -> str:
    """Why the compiled pass cannot run a model of this configuration; empty if it can."""
    if config.model_type not in FAMILIES:
        return f"the model type {config.model_type} is none of {', '.join(FAMILIES)}"
    if head_size(config) % 16:
        return f"the head size {head_size(config)} is no multiple of 16"
    if _activation(config) not in GATES:
        return f"the activation {_activation(config)} is none of {', '.join(GATES)}"
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if getattr(config, name, None):
            return f"it sets {name}"
    if getattr(config, "mlp_bias", False):
        return "its MLP has biases"
    for rotation in _rotations(config):
        if rotation["rope_type"] not in ROTATIONS or rotation.get("partial_rotary_factor", 1.0) != 1.0:
            return f"its rotary embedding is {rotation}"
    return ""


def check(config: Any) -> None:
    """Raise UnsupportedTarget unless the compiled pass runs a model of this configuration."""
    if reason := why_not(config):
        raise UnsupportedTarget(f"the CPU's quantised path does not run this model: {reason}")


def head_size(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _activation(config: Any) -> str:
    return str(getattr(config, "hidden_activation", None) or config.hidden_act)


def is_gemma(config: Any) -> bool:
    return bool(config.model_type == "gemma3_text")


def sizes_of(config: Any) -> Sizes:
    size = head_size(config)
    return Sizes(
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        size=size,
        middle=config.intermediate_size,
        gate=GATES[_activation(config)],
        eps=config.rms_norm_eps,
        scale=float(getattr(config, "query_pre_attn_scalar", size)) ** -0.5,
        embedding_scale=math.sqrt(config.hidden_size) if is_gemma(config) else 1.0,
    )


def layer_kinds(config: Any) -> list[tuple[int, int]]:
    """For each layer: which rotations it uses (an index into `rotation_tables`), and its window, 0 if it has none."""
    window = getattr(config, "sliding_window", None) or 0
    kinds = getattr(config, "layer_types", None) or [SLIDING if window else FULL] * config.num_hidden_layers
    return [(int(is_gemma(config) and kind == SLIDING), window if kind == SLIDING else 0) for kind in kinds]


def _rotations(config: Any) -> list[dict[str, Any]]:
    parameters = config.rope_parameters
    return [parameters[FULL], parameters[SLIDING]] if is_gemma(config) else [parameters]


class Rotations:
    """Tables of cosines and sines that grow with the positions that are used."""

    def __init__(self, config: Any, factors: Tensor | None = None) -> None:
        """`factors` (head size / 2) divide the frequencies, as GGUF files have them for Llama 3."""
        self.most: int = config.max_position_embeddings
        self._tables: Tables = []
        self._angles: list[Callable[[Tensor], tuple[Tensor, Tensor]]]
        dummy = torch.zeros(1)
        if is_gemma(config):
            from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding

            both = Gemma3RotaryEmbedding(config)
            kinds = [kind if kind in both.layer_types else both.layer_types[0] for kind in (FULL, SLIDING)]
            self._angles = [lambda p, kind=kind: both(dummy, p, kind) for kind in kinds]  # type: ignore[misc]
            return
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        rotary = LlamaRotaryEmbedding(config)
        if factors is not None:
            rotary.inv_freq = rotary.inv_freq / factors
        self._angles = [lambda p: rotary(dummy, p)]

    def up_to(self, position: int) -> Tables:
        """Tables that contain this position. A caller holds them while it uses them: other threads may replace them."""
        found = self._tables
        known = len(found[0][0]) if found else 0
        if position < known:
            return found
        # Twice as many as before, so that long texts rebuild the tables seldom.
        size = max(-(-(position + 1) // PIECE), 2 * known // PIECE) * PIECE
        made: Tables = []
        for angles in self._angles:
            pieces = [angles(torch.arange(at, at + PIECE)[None]) for at in range(0, size, PIECE)]
            half = pieces[0][0].shape[-1] // 2
            cos, sin = (torch.cat([piece[i][0, :, :half] for piece in pieces]).contiguous() for i in (0, 1))
            made.append((cos, sin))
        self._tables = made
        return made
