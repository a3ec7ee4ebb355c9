"""EAGLE-3 drafters (arXiv 2503.01840) in the layouts of EAGLE, SpecForge, NVIDIA and `speculators`.

The layouts differ in the name of the first layer, in where the configuration stands, and in what it leaves unsaid. What
it leaves unsaid becomes several readings, of which the best is measured (`conventions.py`).
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from redrafter.bounds import shown
from redrafter.drafters import files
from redrafter.drafters.eagle import Eagle3Config
from redrafter.errors import CorruptCheckpoint, DrafterMismatch
from redrafter.interop.decoder_layers import (
    build,
    flag,
    hidden_states,
    layer_config,
    layer_names,
    made,
    target_fields,
    tensors_of,
)
from redrafter.interop.readings import Published, Reading
from redrafter.targets import TargetInfo

OLD_NORMS = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")
"""Names that `fc_norm.0` to `fc_norm.2` have in older checkpoints."""
IGNORED = ("verifier_", "rotary_emb.", "midlayer.self_attn.rotary_emb.", "layers.0.self_attn.rotary_emb.")
LAYERS = "eagle_aux_hidden_state_layer_ids"


def read(folder: Path, config: Mapping[str, Any], target: TargetInfo) -> Published:
    contained = "speculators_model_type" in config
    described = config.get("transformer_layer_config") if contained else config
    if not isinstance(described, Mapping):
        raise CorruptCheckpoint(f"{folder / files.CONFIG_FILE}: transformer_layer_config must be an object")
    tensors = {k: v for k, v in tensors_of(folder).items() if not k.startswith(IGNORED)}
    for i, old in enumerate(OLD_NORMS):
        if f"{old}.weight" in tensors:
            tensors[f"fc_norm.{i}.weight"] = tensors.pop(f"{old}.weight")
    target_size, fields = target_fields(described, config, tensors, target, folder)
    if config.get("logit_scale", 1) != 1:
        raise CorruptCheckpoint(f"{folder / files.CONFIG_FILE}: logit_scale must be 1")
    if "sliding_attention" in str(described.get("layer_types")):
        raise CorruptCheckpoint(f"{folder / files.CONFIG_FILE}: EAGLE-3 layers with a sliding window are not read")
    first = "midlayer." if any(name.startswith("midlayer.") for name in tensors) else "layers.0."
    chosen = _layers(config, target, folder)
    each = any(name.startswith("fc_norm.") for name in tensors)
    sizes = made(
        Eagle3Config,
        folder,
        **fields,
        context_size=target_size * len(chosen[0][1]),
        layers=chosen[0][1],
        **layer_config(described, folder),
        projected=True,
        context_norm="each" if each else "whole" if "input_norm.weight" in tensors else "none",
        joined=True,
        last_norm=True,
        head="own" if "lm_head.weight" in tensors else "tied",
        attention_bias=f"{first}self_attn.q_proj.bias" in tensors,
        out_bias=f"{first}self_attn.o_proj.bias" in tensors,
        head_norms=f"{first}self_attn.q_norm.weight" in tensors,
    )
    net = build(sizes, tensors, names(sizes, first), folder)
    said = flag(config, "norm_before_residual", folder)
    residuals = ("plain", "normed") if said is None else ("normed",) if said else ("plain",)
    # Outside the container, `norm_output` says something else: whether the head reads a normalised output at all.
    said = flag(config, "norm_output", folder) if contained else None
    recycled = ("plain", "normed") if said is None and not contained else ("normed",) if said else ("plain",)
    readings = [
        Reading(
            f"{where}, {residual} residual, {again} recycled state",
            replace(sizes, layers=layers, residual=residual, recycled=again),
        )
        for (where, layers), residual, again in product(chosen, residuals, recycled)
    ]
    layout = "speculators" if contained else "EAGLE or SpecForge" if first == "midlayer." else "NVIDIA"
    return Published(f"EAGLE-3 in the layout of {layout}", net, tuple(readings), usual=0.5)


def names(config: Eagle3Config, first: str) -> dict[str, str]:
    """Our tensor -> theirs."""
    prefixes = [first, *(f"layers.{i}." for i in range(1, config.blocks))]
    norms = {
        f"context_norms.{i}.weight": f"fc_norm.{i}.weight" if config.context_norm == "each" else "input_norm.weight"
        for i in range(len(config.layers))
    }
    return (
        layer_names(config, prefixes)
        | norms
        | {
            "embedding_norm.weight": f"{first}input_layernorm.weight",
            "feature_norm.weight": f"{first}hidden_norm.weight",
            "project.weight": "fc.weight",
            "head.weight": "lm_head.weight",
            "embedding.weight": "embed_tokens.weight",
        }
    )


def _layers(config: Mapping[str, Any], target: TargetInfo, folder: Path) -> list[tuple[str, tuple[int, ...]]]:
    """The hidden states that it may read, and how to say so; the likeliest first."""
    if config.get(LAYERS) is not None:
        found = hidden_states(config[LAYERS], LAYERS, target, folder)
        return [(f"hidden states {_listed(found)}", found)]
    nested = config.get("eagle_config")
    if isinstance(nested, Mapping):
        if nested.get("use_aux_hidden_state") is False:
            raise CorruptCheckpoint(f"{folder} is an EAGLE drafter that reads one hidden state, which is not read")
        if nested.get(LAYERS) is not None:  # some engines read these as layers' outputs, others as their inputs
            found = hidden_states(nested[LAYERS], f"eagle_config.{LAYERS}", target, folder)
            later = tuple(layer + 1 for layer in found)
            either = [found, later] if max(later) < target.layer_count else [found]
            return [(f"hidden states {_listed(layers)}", layers) for layers in either]
    elif nested is not None:
        raise CorruptCheckpoint(f"{folder / files.CONFIG_FILE}: eagle_config must be an object, got {shown(nested)}")
    count = target.layer_count
    if count < 4:
        raise DrafterMismatch(f"an EAGLE-3 drafter reads three hidden states, and {target.name} has {count} layers")
    usual = (2, count // 2, count - 3)
    return [(f"hidden states {_listed(usual)}, the usual ones", usual)]


def _listed(layers: tuple[int, ...]) -> str:
    return ", ".join(map(str, layers))
