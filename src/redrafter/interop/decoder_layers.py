"""What published drafters have in common: decoder layers as transformers names and describes them.

A reader makes our configuration of theirs and says which of our tensors has which of their names. Nothing of a folder
is executed, and memory is allocated for the tensors that its file holds, no more.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redrafter.bounds import shown
from redrafter.drafters import checkpoint, files
from redrafter.drafters.base import DrafterConfig, DrafterNet
from redrafter.errors import ConfigError, CorruptCheckpoint, DrafterMismatch, first_line
from redrafter.targets import TargetInfo
from redrafter.targets.embedding import embedding_shape

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
LAYER = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "out": "self_attn.o_proj",
    "query_norm": "self_attn.q_norm",
    "key_norm": "self_attn.k_norm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "norm": "input_layernorm",
    "exit_norm": "post_attention_layernorm",
}
"""Our module of a layer -> theirs."""
EXACT = ("default", None)
MOST_LAYERS, MOST_HEAD = 64, 4096
"""Of a published drafter, and numbers of a head: lists of these lengths are made before tensors are compared."""


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """The tensors of a published folder, in fp32, without the prefix that some exporters add."""
    if not (folder / files.WEIGHTS_FILE).exists():
        pickles = sorted(path.name for kind in PICKLES for path in folder.glob(kind))
        if pickles:
            raise CorruptCheckpoint(
                f"{folder} holds its weights as {pickles[0]}, a pickle, which can run any code: save them as "
                f"{files.WEIGHTS_FILE}, in a place that you trust with that"
            )
    return {name.removeprefix("model."): tensor for name, tensor in files.read_tensors(folder).items()}


def layer_config(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The fields of a `DecoderConfig` that a transformers configuration of Llama or Qwen3 decides."""
    where = folder / files.CONFIG_FILE
    if config.get("quantization_config") or config.get("compression_config"):
        raise CorruptCheckpoint(f"{where}: quantised weights of a drafter are not read; take its 16-bit version")
    if config.get("hidden_act", "silu") != "silu":
        raise CorruptCheckpoint(f"{where}: hidden_act must be silu, got {shown(config['hidden_act'])}")
    heads = number(config, "num_attention_heads", folder)
    head_size = number(config, "head_dim", folder, number(config, "hidden_size", folder) // heads, MOST_HEAD)
    eps = config.get("rms_norm_eps", 1e-6)
    if type(eps) not in (int, float):  # null would be torch's default
        raise CorruptCheckpoint(f"{where}: rms_norm_eps must be a number, got {shown(eps)}")
    return {
        "blocks": number(config, "num_hidden_layers", folder, 1, MOST_LAYERS),
        "heads": heads,
        "kv_heads": number(config, "num_key_value_heads", folder, heads),
        "head_size": head_size,
        "exit_size": number(config, "intermediate_size", folder),
        "norm_eps": eps,
        "scaled_norms": True,
        **_rotary(config, where, head_size),
    }


def _rotary(config: Mapping[str, Any], where: Path, head_size: int) -> dict[str, Any]:
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise CorruptCheckpoint(f"{where}: rope_parameters must be an object, got {shown(given)}")
    base = given.get("rope_theta", config.get("rope_theta", 10_000.0))
    kind = given.get("rope_type", given.get("type", "default"))
    if type(base) not in (int, float):
        raise CorruptCheckpoint(f"{where}: rope_theta must be a number, got {shown(base)}")
    if any(each.get("partial_rotary_factor") not in (1, None) for each in (config, given)):
        raise CorruptCheckpoint(f"{where}: rotary positions of a part of a head are not read")
    if kind in EXACT:
        return {"rotary_base": float(base)}
    if kind not in ("linear", "llama3", "yarn"):
        raise CorruptCheckpoint(f"{where}: rope_type must be default, linear, llama3 or yarn, got {shown(kind)}")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    try:
        described = LlamaConfig(
            hidden_size=head_size,
            num_attention_heads=1,
            head_dim=head_size,
            max_position_embeddings=config.get("max_position_embeddings", 2048),
            rope_parameters={**given, "rope_type": kind, "rope_theta": float(base)},
        )
        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](described, torch.device("cpu"))
    except Exception as error:  # whatever the numbers make of it
        raise CorruptCheckpoint(f"{where} does not describe rotary positions: {first_line(error)}") from error
    return {"frequencies": tuple(frequencies.tolist()), "rotary_scale": float(scale)}


def layer_names(config: Any, prefixes: Sequence[str]) -> dict[str, str]:
    """Our tensors of the layers -> theirs; `prefixes`: what their layers are called, with the dot."""
    biased = {"query": config.attention_bias, "key": config.attention_bias, "value": config.attention_bias}
    biased["out"] = config.out_bias
    names = {}
    for i, prefix in enumerate(prefixes):
        for own, theirs in LAYER.items():
            names[f"blocks.{i}.{own}.weight"] = f"{prefix}{theirs}.weight"
            if biased.get(own):
                names[f"blocks.{i}.{own}.bias"] = f"{prefix}{theirs}.bias"
    return names


def build(sizes: DrafterConfig, tensors: dict[str, Tensor], names: Mapping[str, str], folder: Path) -> DrafterNet:
    """A network of these sizes with these tensors; `names`: our tensor -> theirs. Missing and extra ones are named."""
    where = folder / files.WEIGHTS_FILE
    shapes = {names.get(own, own): shape for own, shape in checkpoint.shapes(sizes).items()}
    for what, found in (
        ("lacks", shapes.keys() - tensors.keys()),
        ("has what this format does not know:", tensors.keys() - shapes.keys()),
    ):
        if found:
            more = "" if len(found) <= 5 else f" and {len(found) - 5} more"
            raise CorruptCheckpoint(f"{where} {what} {', '.join(map(shown, sorted(found)[:5]))}{more}")
    for theirs, shape in shapes.items():
        if tuple(tensors[theirs].shape) != shape:
            raise CorruptCheckpoint(
                f"{where}: {theirs} has the shape {tuple(tensors[theirs].shape)}, and by {files.CONFIG_FILE} it must "
                f"be {shape}"
            )
    ours = {own: tensors[names.get(own, own)] for own in checkpoint.shapes(sizes)}
    net = checkpoint.network(sizes, ours, folder)
    checkpoint.load_weights(net, ours, folder)
    return net


def token_ids(tensors: dict[str, Tensor], guessable: int, vocab_size: int, folder: Path) -> Tensor | None:
    """The target's token of each draft token, from `d2t`, which holds differences; checked by `build`."""
    offsets, _ = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if offsets is None:
        if guessable != vocab_size:
            raise CorruptCheckpoint(
                f"{folder / files.WEIGHTS_FILE} has no d2t, which a draft vocabulary of {guessable} tokens out of "
                f"{vocab_size} needs"
            )
        return None
    if offsets.dtype not in (torch.int64, torch.int32) or offsets.shape != (guessable,):
        raise CorruptCheckpoint(
            f"{folder / files.WEIGHTS_FILE}: d2t must be {guessable} whole numbers, and is {offsets.dtype} of the "
            f"shape {tuple(offsets.shape)}"
        )
    if guessable == vocab_size and not offsets.any():
        return None  # every token stands for itself
    # Within a range in which the sum cannot overflow; what is out of the vocabulary is refused afterwards.
    return offsets.long().clamp(-(2**40), 2**40) + torch.arange(guessable)


def drop_known_embedding(tensors: dict[str, Tensor], name: str, target: TargetInfo) -> bool:
    """Remove an input embedding that is the target's; whether there is another one.

    What the target's module gives is compared, since that is what is read instead: it may scale its weights.
    """
    weight = tensors.get(name)
    if weight is None:
        return False
    if weight.dim() == 2 and tuple(weight.shape) == embedding_shape(target.input_embedding):
        known = target.input_embedding
        chunks = torch.split(torch.arange(len(weight)), 8192)
        if all(
            torch.equal(known(ids.to(target.device)).cpu().float(), weight[ids].to(target.dtype).float())
            for ids in chunks
        ):
            del tensors[name]
            return False
    return True


def target_fields(
    described: Mapping[str, Any], said: Mapping[str, Any], tensors: dict[str, Tensor], target: TargetInfo, folder: Path
) -> tuple[int, dict[str, Any]]:
    """The width of the target's hidden states, and the fields of a configuration that vocabulary and embedding decide.

    `described` is the configuration of the layers, `said` that of the drafter. Another target is refused. The tensors
    get the token ids, and lose an embedding that is the target's.
    """
    vocab_size, width = number(described, "vocab_size", folder), number(described, "hidden_size", folder)
    if vocab_size != target.vocab_size:
        raise DrafterMismatch(
            f"the drafter {folder} was made for a vocabulary of {vocab_size}, but the target {target.name} has one of "
            f"{target.vocab_size}"
        )
    reads = number(said, "target_hidden_size", folder, number(described, "target_hidden_size", folder, width))
    if reads != target.hidden_size:
        raise DrafterMismatch(
            f"the drafter {folder} reads hidden states of {reads} numbers, but those of the target {target.name} "
            f"have {target.hidden_size}"
        )
    guessable = number(said, "draft_vocab_size", folder, vocab_size)
    ids = token_ids(tensors, guessable, vocab_size, folder)
    if ids is not None:
        tensors["token_ids"] = ids
    own_embedding = drop_known_embedding(tensors, "embed_tokens.weight", target)
    embedding_size = embedding_shape(target.input_embedding)[1]
    if not own_embedding and embedding_size != width:
        raise DrafterMismatch(
            f"the drafter {folder} has no input embedding, and reads embeddings of {width} numbers, but those of the "
            f"target {target.name} have {embedding_size}"
        )
    return reads, {
        "vocab_size": vocab_size,
        "width": width,
        "draft_vocab_size": None if ids is None else guessable,
        "embedding_size": embedding_size,
        "own_embedding": own_embedding,
    }


def number(
    config: Mapping[str, Any], name: str, folder: Path, default: int | None = None, most: int = 2**31 - 1
) -> int:
    """A whole number of a configuration; the default where it is missing or null."""
    value = config.get(name)
    if value is None and default is not None:
        value = default
    if type(value) is not int or not 0 < value <= most:
        raise CorruptCheckpoint(
            f"{folder / files.CONFIG_FILE}: {name} must be a whole number from 1 to {most}, got {shown(value)}"
        )
    return value


def flag(config: Mapping[str, Any], name: str, folder: Path) -> bool | None:
    """True or false; None where the configuration does not say."""
    value = config.get(name)
    if value is not None and type(value) is not bool:
        raise CorruptCheckpoint(f"{folder / files.CONFIG_FILE}: {name} must be true or false, got {shown(value)}")
    return value


def hidden_states(value: Any, name: str, target: TargetInfo, folder: Path) -> tuple[int, ...]:
    """A list of the target's layers. As a hidden state each is a layer's input: the last one is normalised already."""
    most = target.layer_count - 1
    if not isinstance(value, list) or not value or not all(type(x) is int and 0 <= x <= most for x in value):
        raise CorruptCheckpoint(
            f"{folder / files.CONFIG_FILE}: {name} must be a list of whole numbers from 0 to {most}, the layers of "
            f"{target.name}, got {shown(value)}"
        )
    return tuple(value)


def made(kind: type[DrafterConfig], folder: Path, **fields: Any) -> Any:
    """Our configuration; what does not fit is the file's mistake."""
    try:
        return kind(**fields)
    except ConfigError as error:
        raise CorruptCheckpoint(f"{folder / files.CONFIG_FILE} does not describe a drafter: {error}") from error
