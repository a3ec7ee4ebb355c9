"""Which models the CPU's compiled pass runs: sizes, layers and rotary embeddings from a transformers config."""

import math
from typing import Any

import torch
from torch import Tensor

from redrafter.errors import UnsupportedTarget
from redrafter.kernels.cpu.model import GELU, SILU, Sizes
from redrafter.targets.attention import FULL, SLIDING

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "granite", "phi3", "smollm3")
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
        scale=_attention_scale(config),
        embedding_scale=_embedding_scale(config),
        residual_scale=float(getattr(config, "residual_multiplier", 1.0)),
        logit_scale=1.0 / float(getattr(config, "logits_scaling", 1.0)),
    )


def _attention_scale(config: Any) -> float:
    """What queries times keys are multiplied with."""
    if config.model_type == "granite":
        return float(config.attention_multiplier)
    return math.pow(getattr(config, "query_pre_attn_scalar", head_size(config)), -0.5)


def _embedding_scale(config: Any) -> float:
    return math.sqrt(config.hidden_size) if is_gemma(config) else float(getattr(config, "embedding_multiplier", 1.0))


def layer_kinds(config: Any) -> list[tuple[int, int]]:
    """For each layer: which rotations it uses (an index into `rotation_tables`), and its window, 0 if it has none."""
    window = getattr(config, "sliding_window", None) or 0
    kinds = getattr(config, "layer_types", None) or [SLIDING if window else FULL] * config.num_hidden_layers
    rotated = getattr(config, "no_rope_layers", None) or [1] * config.num_hidden_layers
    return [
        (int(not turns or (is_gemma(config) and kind == SLIDING)), window if kind == SLIDING else 0)
        for kind, turns in zip(kinds, rotated, strict=True)
    ]


def _rotations(config: Any) -> list[dict[str, Any]]:
    parameters = config.rope_parameters
    return [parameters[FULL], parameters[SLIDING]] if is_gemma(config) else [parameters]


def has_plain_rotations(config: Any) -> bool:
    """Whether no rotary embedding is scaled: then `Rotations` needs no configuration class of transformers."""
    return all(rotation["rope_type"] == "default" for rotation in _rotations(config))


def _kinds(config: Any) -> list[str]:
    """The kinds of layers whose rotations Gemma's full and sliding layers use. A small model may lack one of them."""
    return [kind if kind in config.layer_types else config.layer_types[0] for kind in (FULL, SLIDING)]


def _frequencies(config: Any, kind: str | None) -> tuple[Tensor, float]:
    """Rotary frequencies (head size / 2) of a kind of layer, and the factor of their cosines and sines."""
    rotation = config.rope_parameters if kind is None else config.rope_parameters[kind]
    if rotation["rope_type"] == "default":
        size = head_size(config)
        return 1.0 / rotation["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float) / size), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    found: tuple[Tensor, float] = ROPE_INIT_FUNCTIONS[rotation["rope_type"]](config, layer_type=kind)
    return found


class Rotations:
    """Tables of cosines and sines that grow with the positions that are used, with the bits of transformers' own."""

    def __init__(self, config: Any, factors: Tensor | None = None) -> None:
        """`factors` (head size / 2) divide the frequencies, as GGUF files have them for Llama 3."""
        self._tables: Tables = []
        self._frequencies = [_frequencies(config, kind) for kind in (_kinds(config) if is_gemma(config) else (None,))]
        if factors is not None:
            self._frequencies = [(found / factors, scale) for found, scale in self._frequencies]
        if not all(getattr(config, "no_rope_layers", None) or (1,)):  # some layers turn nothing: by an angle of 0
            self._frequencies.append((torch.zeros_like(self._frequencies[0][0]), 1.0))

    def up_to(self, position: int) -> Tables:
        """Tables that contain this position. A caller holds them while it uses them: other threads may replace them."""
        found = self._tables
        known = len(found[0][0]) if found else 0
        if position < known:
            return found
        # Twice as many as before, so that long texts rebuild the tables seldom.
        size = max(-(-(position + 1) // PIECE), 2 * known // PIECE) * PIECE
        made: Tables = []
        for frequencies, scale in self._frequencies:
            pieces = [torch.arange(at, at + PIECE)[:, None].float() * frequencies for at in range(0, size, PIECE)]
            cos, sin = (torch.cat([turn(piece) * scale for piece in pieces]) for turn in (torch.cos, torch.sin))
            made.append((cos, sin))
        self._tables = made
        return made
