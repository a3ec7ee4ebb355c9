"""Writes drafters of published form in the layouts of other projects, which the readers beside this file read back.

These are EAGLE-3, DFlash (with DSpark and JetSpec) and the container of `speculators`. What a layout has no place for
is refused by its name. Draft tokens are written in ascending order, as others choose them.
"""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redrafter.config import require
from redrafter.drafters import checkpoint, files
from redrafter.drafters.base import DrafterNet, check_shapes
from redrafter.drafters.block import BlockConfig
from redrafter.drafters.eagle import Eagle3Config
from redrafter.errors import ConfigError
from redrafter.interop import block, eagle3, speculators
from redrafter.targets import Target
from redrafter.targets.embedding import embedding_rows

FORMATS = {"eagle3": ("eagle3", "speculators"), "block": ("dflash", "speculators")}
"""Kind of a drafter -> the formats it can be written in."""
FIXED: dict[str, dict[str, Any]] = {
    "eagle3": {
        "projected": True, "joined": True, "last_norm": True, "scaled_norms": True, "frequencies": (),
        "rotary_scale": 1.0,
    },
    "block": {"scaled_norms": True, "frequencies": (), "rotary_scale": 1.0, "own_mask": False},
}  # fmt: skip
"""Kind of a drafter -> what must be so. A field that is neither here nor in `SAID` must have its default."""
SAID = {
    "vocab_size", "context_size", "embedding_size", "draft_vocab_size", "layers", "blocks", "heads", "kv_heads",
    "head_size", "exit_size", "rotary_base", "norm_eps", "head_norms", "attention_bias", "out_bias", "width", "head",
    "own_embedding", "context_norm", "residual", "slots", "mask_token", "from_last", "guesses", "causal", "windows",
    "causal_windows", "markov", "markov_rank",
}  # fmt: skip
"""What the layouts say of a network."""


def write(
    folder: Path,
    net: DrafterNet,
    target: Target,
    to: str,
    architectures: list[str],
    depth: int,
    overwrite: bool = False,
) -> None:
    """`architectures`: the target's; `depth`: how many tokens another engine guesses with EAGLE-3."""
    check_shapes(net.config, target)
    _check(net.config, to)
    if isinstance(net.config, Eagle3Config):
        described, tensors = _eagle3(net, net.config, target, contained=to == "speculators")
    else:
        assert isinstance(net.config, BlockConfig)
        described, tensors = _block(net, net.config, target, contained=to == "speculators")
        depth = net.config.guesses
    if to == "speculators":
        kind = described["speculators_model_type"]
        described |= speculators.conventions(kind, depth, target.name, architectures)
    files.write_files(folder, described, tensors, overwrite)


def _check(config: Any, to: str) -> None:
    """Raise for what the layout has no place for."""
    fixed = FIXED[config.kind] | ({} if to == "speculators" else {"recycled": "plain"})
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name == "recycled" and field.name not in fixed:
            continue
        if field.name in fixed or field.name not in SAID:
            wanted = fixed.get(field.name, field.default)
            require(value == wanted, f"the format {to} has no place for {field.name} {value}: it must be {wanted}")
    require(config.norm_eps is not None, f"the format {to} has no place for norms without norm_eps")
    if config.kind == "block":
        usual = config.slots - (not config.from_last)
        require(config.guesses == usual, f"the format {to} has no place for {config.guesses} guesses of {usual}")
        require(
            to != "speculators" or not config.causal,
            "the format speculators has no place for a causal block: use dflash",
        )
        require(len(set(config.windows) - {0}) <= 1, f"the format {to} has no place for windows of several sizes")
    require(
        config.own_embedding or config.embedding_size == config.width,
        f"the format {to} has no place for embeddings of {config.embedding_size} beside layers of {config.width}",
    )


def _eagle3(
    net: DrafterNet, config: Eagle3Config, target: Target, contained: bool
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    tensors = _tensors(net, target, eagle3.names(config, "layers.0." if contained else "midlayer."), own_head=True)
    said = _vocabulary(config, target) | {
        "norm_before_residual": config.residual == "normed",
        "norm_before_fc": config.context_norm == "whole",
        "fc_norm": config.context_norm == "each",
        eagle3.LAYERS: _inputs(config, target),
    }
    layers = _layers(config, target, "llama")
    if not contained:
        return layers | said | {"architectures": ["LlamaForCausalLMEagle3"]}, tensors
    return said | {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "norm_output": config.recycled == "normed",
        "transformer_layer_config": layers,
    }, tensors


def _block(
    net: DrafterNet, config: BlockConfig, target: Target, contained: bool
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    markov = config.markov != "none"
    whole = contained or markov or config.draft_vocab_size is not None  # DFlash alone has no head of its own
    tensors = _tensors(net, target, block.names(config), own_head=whole)
    types = ["sliding_attention" if window else "full_attention" for window in config.windows or [0] * config.blocks]
    layers = _layers(config, target, "qwen3") | {"layer_types": types}
    if any(config.windows):
        layers |= {"sliding_window": max(config.windows), "use_sliding_window": True}
    said = _vocabulary(config, target) | {
        "block_size": config.slots,
        "mask_token_id": config.mask_token,
        "sample_from_anchor": config.from_last,
        "sliding_window_non_causal": not config.causal_windows,
    }
    if markov:
        said |= {"markov_rank": config.markov_rank, "markov_head_type": config.markov}
        said |= {"enable_confidence_head": False}
    if contained:
        return said | {
            "architectures": ["DSparkSpeculator" if markov else "DFlashSpeculator"],
            "speculators_model_type": "dspark" if markov else "dflash",
            "aux_hidden_state_layer_ids": _inputs(config, target),
            "transformer_layer_config": layers,
        }, tensors
    outputs = [layer - 1 for layer in _counted(config, target)]
    require(min(outputs) >= 0, "the format dflash numbers layers' outputs, and the drafter reads the embedding")
    said["num_target_layers"] = target.layer_count
    if markov:
        if "embed_tokens.weight" not in tensors:
            ids = torch.arange(target.vocab_size, device=target.device)
            tensors["embed_tokens.weight"] = target.input_embedding(ids).detach().float().cpu()
        said |= {"architectures": ["Qwen3DSparkModel"], "target_layer_ids": outputs, "causal": config.causal}
    else:
        nested = {"mask_token_id": config.mask_token, "target_layer_ids": outputs, "causal": config.causal}
        said |= {"architectures": ["DFlashDraftModel"], "dflash_config": nested | {"causal_head": config.causal}}
    return layers | said, tensors


def _counted(config: Any, target: Target) -> list[int]:
    """The hidden states it reads, numbered from 0, the embedding."""
    return [layer if layer >= 0 else target.layer_count + 1 + layer for layer in config.layers]


def _inputs(config: Any, target: Target) -> list[int]:
    """The hidden states it reads, each the input of a layer."""
    found = _counted(config, target)
    if max(found) >= target.layer_count:
        raise ConfigError(
            "the drafter reads the target's last hidden state, which is normalised; in this format hidden states are "
            "those before a layer: train it with other --layers"
        )
    return found


def _vocabulary(config: Any, target: Target) -> dict[str, Any]:
    return {"draft_vocab_size": config.guessable, "target_hidden_size": target.hidden_size}


def _layers(config: Any, target: Target, model_type: str) -> dict[str, Any]:
    """The layers as a transformers configuration has them."""
    return {
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": config.exit_size,
        "num_hidden_layers": config.blocks,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.key_heads,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rotary_base,
        "rope_scaling": None,
        "attention_bias": config.attention_bias,
        "max_position_embeddings": min(target.max_positions, 2**31 - 1),
        "tie_word_embeddings": False,
    }


def _tensors(net: DrafterNet, target: Target, names: dict[str, str], own_head: bool) -> dict[str, Tensor]:
    """The tensors by their names there, those of each draft token in ascending order of the tokens."""
    ours = {name: tensor.detach().float().cpu() for name, tensor in net.state_dict().items() if name != "token_ids"}
    if own_head and "head.weight" not in ours:
        ours["head.weight"] = embedding_rows(target.output_embedding, net.token_ids).detach().float().cpu()
    tensors = {}
    if net.token_ids is not None:
        ids, order = net.token_ids.cpu().sort()
        for name in ("head.weight", "markov.out.weight"):
            if name in ours:
                ours[name] = ours[name][order]
        known = torch.zeros(net.config.vocab_size, dtype=torch.bool)
        tensors = {"d2t": ids - torch.arange(len(ids)), "t2d": known.index_fill(0, ids, True)}
    return tensors | {names.get(name, name): tensor for name, tensor in ours.items()}


def own(folder: Path) -> tuple[DrafterNet, dict[str, str]] | None:
    """The network in a folder of ours that these formats have a place for; None: it is another folder."""
    config = files.read_config(folder)
    if not checkpoint.is_drafter(config):
        return None
    net, made_for = checkpoint.read(folder)
    return (net, made_for) if net.config.kind in FORMATS else None
