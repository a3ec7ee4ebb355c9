"""Block drafters: DFlash, DSpark and JetSpec, in their own layouts and in the container of `speculators`."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from redrafter.bounds import shown
from redrafter.drafters import files
from redrafter.drafters.block import BlockConfig
from redrafter.errors import CorruptCheckpoint, DrafterMismatch
from redrafter.interop import pickled
from redrafter.interop.decoder_layers import (
    build,
    flag,
    hidden_states,
    layer_config,
    layer_names,
    made,
    number,
    target_fields,
    tensors_of,
)
from redrafter.interop.readings import Published, Reading
from redrafter.targets import TargetInfo

IGNORED = ("verifier_", "rotary_emb.", "confidence_head.")
"""What a draft does not need; the confidence head says how far to guess, which the planner learns by itself."""
MASK_FILE, MOST_MASK = "mask_embedding.pt", 2**22
RENAMED = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}


def read(folder: Path, config: Mapping[str, Any], target: TargetInfo) -> Published:
    contained = "speculators_model_type" in config
    described = config.get("transformer_layer_config") if contained else config
    nested = config.get("dflash_config") or {}
    if not isinstance(described, Mapping) or not isinstance(nested, Mapping):
        raise CorruptCheckpoint(
            f"{folder / files.CONFIG_FILE}: transformer_layer_config and dflash_config must be objects"
        )
    said = {**config, **nested}
    tensors = {RENAMED.get(k, k): v for k, v in tensors_of(folder).items() if not k.startswith(IGNORED)}
    target_size, fields = target_fields(described, said, tensors, target, folder)
    if (mask := _mask(folder, fields["width"])) is not None:
        tensors["mask"] = mask
    sizes = layer_config(described, folder)
    markov = _markov(said, tensors, folder)
    slots = number(said, "block_size", folder)
    from_last = flag(said, "sample_from_anchor", folder)
    from_last = markov != "none" if from_last is None else from_last
    # JetSpec can leave the last slot's guess out although all slots guess the next token.
    shifted = bool(flag(said, "draft_shift", folder))
    layers = _layers(said, contained, sizes["blocks"], target, folder)
    whole = made(
        BlockConfig,
        folder,
        **fields,
        context_size=target_size * len(layers[0]),
        layers=layers[0],
        **sizes,
        slots=slots,
        mask_token=_mask_token(said, folder),
        from_last=from_last or shifted,
        guesses=max(1, slots if from_last and not shifted else slots - 1),
        causal=bool(flag(said, "causal_head", folder) or flag(said, "causal", folder)),
        windows=_windows(described, said, sizes["blocks"], folder),
        causal_windows=not flag(said, "sliding_window_non_causal", folder),
        markov=markov,
        markov_rank=number(said, "markov_rank", folder) if markov != "none" else 1,
        head="own" if "lm_head.weight" in tensors else "tied",
        own_mask=mask is not None,
        attention_bias="layers.0.self_attn.q_proj.bias" in tensors,
        out_bias="layers.0.self_attn.o_proj.bias" in tensors,
        head_norms="layers.0.self_attn.q_norm.weight" in tensors,
    )
    net = build(whole, tensors, names(whole), folder)
    readings = tuple(
        Reading(f"hidden states {', '.join(map(str, chosen))}", replace(whole, layers=chosen)) for chosen in layers
    )
    name = "JetSpec" if whole.causal else "DFlash" if markov == "none" else "DSpark"
    return Published(f"{name} in {'the layout of speculators' if contained else 'its own layout'}", net, readings, 0.4)


def names(config: BlockConfig) -> dict[str, str]:
    """Our tensor -> theirs."""
    return layer_names(config, [f"layers.{i}." for i in range(config.blocks)]) | {
        "project.weight": "fc.weight",
        "context_norm.weight": "hidden_norm.weight",
        "embedding.weight": "embed_tokens.weight",
        "head.weight": "lm_head.weight",
        "markov.known.weight": "markov_head.markov_w1.weight",
        "markov.out.weight": "markov_head.markov_w2.weight",
        "markov.gate.weight": "markov_head.gate_proj.weight",
        "markov.gate.bias": "markov_head.gate_proj.bias",
        "markov.joint.weight": "markov_head.joint_proj.weight",
        "markov.joint.bias": "markov_head.joint_proj.bias",
    }


def _layers(
    said: Mapping[str, Any], contained: bool, blocks: int, target: TargetInfo, folder: Path
) -> list[tuple[int, ...]]:
    """The hidden states that it may read. Its own layout numbers layers' outputs, the container hidden states."""
    name = "aux_hidden_state_layer_ids" if contained else "target_layer_ids"
    if said.get(name) is not None:
        found = hidden_states(said[name], name, target, folder)
    elif contained:
        raise CorruptCheckpoint(f"{folder / files.CONFIG_FILE} has no {name}")
    else:
        count = target.layer_count
        if count < 5 or blocks > count:
            raise DrafterMismatch(f"{folder / files.CONFIG_FILE} has no {name}, and {target.name} has {count} layers")
        found = tuple(round(1 + i * (count - 4) / (blocks - 1)) for i in range(blocks)) if blocks > 1 else (count // 2,)
    later = tuple(layer + 1 for layer in found)
    if not contained:  # as the original counts, the last layer's output is the one after the final norm
        return [later]
    return [found, later] if max(later) < target.layer_count else [found]  # some wrote their own layout's numbers


def _markov(said: Mapping[str, Any], tensors: Mapping[str, Tensor], folder: Path) -> Any:
    if not any(name.startswith("markov_head.") for name in tensors):
        return "none"
    kind = said.get("markov_head_type", "vanilla")
    if kind not in ("vanilla", "gated", "rnn"):
        raise CorruptCheckpoint(
            f"{folder / files.CONFIG_FILE}: markov_head_type must be vanilla, gated or rnn, got {shown(kind)}"
        )
    return kind


def _mask_token(said: Mapping[str, Any], folder: Path) -> int:
    value = said.get("mask_token_id")
    if type(value) is not int or value < 0:
        raise CorruptCheckpoint(f"{folder / files.CONFIG_FILE}: mask_token_id must be a token id, got {shown(value)}")
    return value


def _windows(described: Mapping[str, Any], said: Mapping[str, Any], blocks: int, folder: Path) -> tuple[int, ...]:
    """The sliding window of each layer; 0: none."""
    types = described.get("layer_types") or ["full_attention"] * blocks
    if flag(said, "attention_sink_bias", folder):
        raise CorruptCheckpoint(f"{folder / files.CONFIG_FILE}: attention_sink_bias is not read")
    if not isinstance(types, list) or len(types) != blocks:
        raise CorruptCheckpoint(f"{folder / files.CONFIG_FILE}: layer_types must name {blocks} layers")
    if "sliding_attention" not in types and not flag(said, "use_swa", folder):
        return ()
    size = number(said if said.get("swa_window_size") else described,
                  "swa_window_size" if said.get("swa_window_size") else "sliding_window", folder)  # fmt: skip
    everywhere = "sliding_attention" not in types
    return tuple(size if everywhere or kind == "sliding_attention" else 0 for kind in types)


def _mask(folder: Path, width: int) -> Tensor | None:
    """The embedding of masks, where it has a file of its own: a pickle, of which tensors alone are read."""
    path = folder / MASK_FILE
    if not path.exists():
        return None
    values = list(pickled.read(path, MOST_MASK).values())
    if len(values) != 1 or values[0].numel() != width:
        raise CorruptCheckpoint(f"cannot read {path}: it must hold one tensor of {width} numbers")
    return values[0].flatten()
