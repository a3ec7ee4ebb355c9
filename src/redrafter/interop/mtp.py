"""MTP modules: the layers for multi-token prediction that some targets' own checkpoints have.

A module guesses like an EAGLE drafter of one layer: norms of the target's last hidden state and of the next token's
embedding, a product that fuses them, a decoder layer, a norm for the head. The layer is of the kind that the target
has, so transformers makes it of the target's configuration. When it loads a target it leaves these tensors out, so
they are read from the files of the target's folder.
"""

import copy
import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redrafter.bounds import shown
from redrafter.drafters import EagleConfig, EagleNet
from redrafter.drafters.base import NetDrafter
from redrafter.drafters.decoder import attend_causally
from redrafter.drafters.eagle.target_layer import NAME, TargetLayer, attention
from redrafter.errors import (
    CorruptCheckpoint,
    DrafterMismatch,
    ModelNotFound,
    RedrafterError,
    UnsupportedDrafter,
    first_line,
)
from redrafter.interop.decoder_layers import drop_known_embedding, made
from redrafter.interop.readings import Published, Reading
from redrafter.targets import Target, TargetInfo
from redrafter.targets.budget import folder_budget
from redrafter.targets.embedding import embedding_rows, embedding_shape
from redrafter.targets.quantised.files import FLOATS, WeightFiles
from redrafter.targets.quantised.load import FORMATS, Dequantised, Plain, quantisation

log = logging.getLogger(__name__)

State = dict[str, Dequantised | Plain]
MTP = "mtp"
"""The name of the drafter that is in the target's own checkpoint."""
NUMBERED = re.compile(r"(?!mtp\.)(?:.+\.)?layers\.(\d{1,4})\.eh_proj\.weight")
EXPERT = re.compile(r".+\.mlp\.experts\.(\d+)\.(.+)")
OTHERS = re.compile(r"(?:^|[._])(?:mtp|nextn)[._]")
"""Marks of modules in layouts that are not read."""
LAYER = "model.layers.0."
"""Where transformers has the one layer of the model that it loads for us."""
UNKNOWN = "has what the model does not know:"
MOST_TOKENS = 8
"""The vocabulary of that model, whose embeddings nobody uses."""


@dataclass(frozen=True)
class Layout:
    """Where a checkpoint has its module."""

    name: str
    layer: str
    """What the names of the decoder layer's tensors begin with."""
    parts: Mapping[str, str]
    """Our tensor -> theirs, of what is beside the layer."""
    unknown: tuple[str, ...]
    """Tensors of the module that are neither."""
    modules: int
    first_embedding: tuple[bool, ...]
    """Whether the first pair's embedding is read; engines differ."""


def exists(target: TargetInfo) -> bool:
    """Whether the target's checkpoint has a module, in whichever layout. Only files whose models may have one are read.

    What transformers leaves out when it loads a model is what its class says.
    """
    if not getattr(vars(target).get("model"), "_keys_to_ignore_on_load_unexpected", None):
        return False
    try:
        names = WeightFiles(folder_of(target))
        return _layout(names) is not None or any(OTHERS.search(name) for name in names)
    except RedrafterError as error:
        log.debug("%s: no MTP module was looked for: %s", target.name, error)
        return False


def make(target: Target) -> NetDrafter[Any]:
    """The module in the target's own checkpoint, with the reading of its conventions that guesses best."""
    from redrafter.interop import conventions  # imports transformers, which packed weights do not need

    return conventions.choose(read(folder_of(target), target), target)


def folder_of(target: TargetInfo) -> Path:
    """The folder that the target was loaded from."""
    model: Any = vars(target).get("model")  # packed weights would load it
    source = str(getattr(model, "name_or_path", "") or "")
    if Path(source).is_dir() and source:
        return Path(source)
    from huggingface_hub import snapshot_download

    try:
        if not source:
            raise ValueError("it was not loaded from a checkpoint of transformers")
        revision = getattr(model.config, "_commit_hash", None)
        return Path(snapshot_download(source, revision=revision, local_files_only=True))
    except Exception as error:
        raise ModelNotFound(
            f"the drafter {MTP!r} is read from the target's own checkpoint, and the files of {target.name} are not "
            f"found: {first_line(error)}"
        ) from error


def read(folder: Path, target: TargetInfo) -> Published:
    tensors = WeightFiles(folder)
    layout = _layout(tensors)
    if layout is None:
        other = sorted(name for name in tensors if OTHERS.search(name))
        if other:
            raise UnsupportedDrafter(
                f"the MTP module in {folder} is in a layout that redrafter does not read (its tensors are "
                f"{', '.join(map(shown, other[:3]))}, ...); it reads those of DeepSeek-V3, GLM-4.5, Qwen3-Next and "
                "Qwen3.5"
            )
        raise ModelNotFound(f"{folder} has no MTP module: no tensor of its files is one of a module's")
    given = _configuration(folder)
    state = _state(given, layout, tensors, target.dtype)
    beside = {own: state.pop(name)[...].float() for own, name in layout.parts.items() if name in state}
    _check_beside(beside, layout, target, folder)
    model = _layer(folder, given, layout, state, target.dtype)
    decoder = model.get_decoder()
    for own in ("embedding_norm.weight", "feature_norm.weight", "norm.weight"):
        beside[own] = beside[own] + _added(decoder.norm)
    layer = TargetLayer(decoder.layers[0], decoder.rotary_emb)
    own_embedding = drop_known_embedding(beside, "embedding.weight", target)
    head = "own" if _has_own_head(beside, target) else "tied"
    sizes = made(
        EagleConfig,
        folder,
        vocab_size=target.vocab_size,
        context_size=target.hidden_size,
        embedding_size=embedding_shape(target.input_embedding)[1],
        **_cache_sizes(layer, target, folder),
        exit_size=1,  # of layers of our own
        norm_eps=given.rms_norm_eps,
        scaled_norms=True,
        last_norm=True,
        head=head,
        own_embedding=own_embedding,
    )
    net = EagleNet(sizes, [layer])
    beside["fuse.bias"] = torch.zeros(target.hidden_size)
    net.load_state_dict(beside, strict=False)
    net.to(target.dtype).eval()
    _check_finite(net, folder)
    readings = tuple(
        Reading(
            f"{again} recycled state" + ("" if len(layout.first_embedding) == 1 else ", " + _first(first)),
            replace(sizes, recycled=again, first_embedding=first),
        )
        for again, first in product(("normed", "plain"), layout.first_embedding)
    )
    which = "" if layout.modules == 1 else f", the first of {layout.modules}"
    return Published(f"MTP in the layout of {layout.name}{which}", net, readings, usual=0.5)


def _first(read: bool) -> str:
    return "first embedding read" if read else "first embedding zero"


def _layout(names: Collection[str]) -> Layout | None:
    """Which layout the names of a checkpoint's tensors are in.

    >>> _layout(["model.layers.61.eh_proj.weight", "model.layers.61.input_layernorm.weight"]).layer
    'model.layers.61.'
    """
    if "mtp.fc.weight" in names:
        parts = {
            "embedding_norm.weight": "mtp.pre_fc_norm_embedding.weight",
            "feature_norm.weight": "mtp.pre_fc_norm_hidden.weight",
            "fuse.weight": "mtp.fc.weight",
            "norm.weight": "mtp.norm.weight",
        }
        layers = [name for name in names if name.startswith("mtp.layers.")]
        unknown = {name for name in names if name.startswith("mtp.")} - {*layers, *parts.values()}
        modules = len({name.split(".")[2] for name in layers})
        return Layout("Qwen3-Next and Qwen3.5", "mtp.layers.0.", parts, tuple(sorted(unknown)), modules, (True,))
    found = sorted((int(match[1]), match[0]) for name in names if (match := NUMBERED.fullmatch(name)))
    if not found:
        return None
    prefix = found[0][1].removesuffix("eh_proj.weight")
    parts = {
        "embedding_norm.weight": f"{prefix}enorm.weight",
        "feature_norm.weight": f"{prefix}hnorm.weight",
        "fuse.weight": f"{prefix}eh_proj.weight",
        "norm.weight": f"{prefix}shared_head.norm.weight",
        "head.weight": f"{prefix}shared_head.head.weight",
        "embedding.weight": f"{prefix}embed_tokens.weight",
    }
    return Layout("DeepSeek and GLM", prefix, parts, (), len(found), (True, False))


def _configuration(folder: Path) -> Any:
    """The configuration of the target's language model."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False).get_text_config()
    except Exception as error:
        raise CorruptCheckpoint(f"cannot read the configuration of {folder}: {first_line(error)}") from error


def _check_beside(beside: Mapping[str, Tensor], layout: Layout, target: TargetInfo, folder: Path) -> None:
    """Whether what is beside the layer is there, and of the target's sizes."""
    width = target.hidden_size
    shapes = {
        "embedding_norm.weight": (width,),
        "feature_norm.weight": (width,),
        "norm.weight": (width,),
        "fuse.weight": (width, 2 * width),
    }
    _refuse_if([layout.parts[own] for own in shapes if own not in beside], "lacks", folder)
    for own in ("head.weight", "embedding.weight"):
        if own in beside and len(beside[own]) != target.vocab_size:
            raise DrafterMismatch(
                f"the MTP module in {folder} was made for a vocabulary of {len(beside[own])}, but the target "
                f"{target.name} has one of {target.vocab_size}"
            )
        shapes[own] = (target.vocab_size, width)
    for own, tensor in beside.items():
        if tuple(tensor.shape) != shapes[own]:
            raise DrafterMismatch(
                f"the MTP module in {folder}: {layout.parts[own]} has the shape {tuple(tensor.shape)}, and for hidden "
                f"states of {width} numbers, as those of {target.name}, it must be {shapes[own]}"
            )


def _state(given: Any, layout: Layout, tensors: WeightFiles, dtype: torch.dtype) -> State:
    """The module's tensors, each of which is read or dequantised when it is indexed."""
    mine = {
        name: tensors[name]
        for name in tensors
        if name.startswith(layout.layer) or name in layout.parts.values()
        if not name.endswith("inv_freq")
    }
    stored = quantisation(given)
    method = (stored or {}).get("quant_method", "compressed-tensors")
    rounded = {each.name: each for each in FORMATS[method](stored or {}, mine)} if stored and method in FORMATS else {}
    state: dict[str, Dequantised | Plain] = {
        f"{name}.weight": Dequantised(each, dtype) for name, each in rounded.items()
    }
    for name, one in mine.items():
        if name.rpartition(".")[0] in rounded and not name.endswith(".bias"):
            continue
        if one.dtype not in FLOATS:
            raise one.wrong(f"has the type {one.dtype}, and its configuration does not say how it is quantised")
        state[name] = Plain(one)
    return state


def _layer(
    folder: Path, given: Any, layout: Layout, state: Mapping[str, Dequantised | Plain], dtype: torch.dtype
) -> Any:
    """A model of the target's kind whose only layer is the module's."""
    from transformers import AttentionInterface, AutoModelForCausalLM

    if getattr(given, "index_topk", None) is not None:
        raise UnsupportedDrafter(
            f"the MTP module in {folder} has indexed attention, which redrafter does not draft with"
        )
    _refuse_if(_lost_experts(state), "lacks", folder)
    _refuse_if(layout.unknown, UNKNOWN, folder)
    config = _of_one_layer(given, any(".mlp.experts." in name for name in state), folder)
    AttentionInterface.register(NAME, attention)
    kind = AutoModelForCausalLM._model_mapping.get(type(config), None)  # as `vision_language.model_class`
    if kind is None:
        raise UnsupportedDrafter(f"transformers has no causal LM of the model type {config.model_type}")
    width = given.hidden_size
    unused = {
        "model.embed_tokens.weight": torch.zeros(MOST_TOKENS, width),
        "lm_head.weight": torch.zeros(MOST_TOKENS, width),
        "model.norm.weight": torch.zeros(width),
    }
    try:
        with folder_budget(folder):
            model, info = kind.from_pretrained(
                None,
                config=config,
                state_dict={LAYER + name.removeprefix(layout.layer): each for name, each in state.items()} | unused,
                dtype=dtype,
                output_loading_info=True,
            )
    except RedrafterError:
        raise
    except Exception as error:
        raise CorruptCheckpoint(f"cannot load the MTP module in {folder}: {first_line(error)}") from error
    for what, keys in (("lacks", info["missing_keys"]), (UNKNOWN, info["unexpected_keys"])):
        _refuse_if([key.replace(LAYER, layout.layer) for key in keys if key.startswith(LAYER)], what, folder)
    if dtype == torch.float64 and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the fused ones have no fp64
    model.config._attn_implementation = NAME
    return model


def _refuse_if(names: Collection[str], what: str, folder: Path) -> None:
    if names:
        raise CorruptCheckpoint(f"the MTP module in {folder} {what} {', '.join(map(shown, sorted(names)[:5]))}")


def _lost_experts(names: Collection[str]) -> list[str]:
    """What one expert lacks and another one has; transformers joins them, and would not say which."""
    found = {(match[1], match[2]) for name in names if (match := EXPERT.fullmatch(name))}
    each, ends = sorted({number for number, _ in found}), sorted({end for _, end in found})
    return [f"mlp.experts.{number}.{end}" for number in each for end in ends if (number, end) not in found]


def _of_one_layer(given: Any, experts: bool, folder: Path) -> Any:
    """A configuration of one layer like the module's, with or without experts."""
    config = copy.deepcopy(given)
    for name in ("quantization_config", "compression_config"):
        if hasattr(config, name):
            delattr(config, name)
    changes: dict[str, Any] = {
        "num_hidden_layers": 1,
        "vocab_size": MOST_TOKENS,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    }
    types = getattr(given, "layer_types", None)
    if types is not None and "full_attention" not in types:
        raise UnsupportedDrafter(f"the MTP module in {folder} is of a model without layers of full attention")
    by_layer = {
        "layer_types": ["full_attention"],
        "mlp_layer_types": ["sparse" if experts else "dense"],
        "first_k_dense_replace": 0 if experts else 1,
        "mlp_only_layers": [] if experts else [0],
        "decoder_sparse_step": 1,
    }
    changes |= {name: value for name, value in by_layer.items() if getattr(given, name, None) is not None}
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def _added(norm: Any) -> float:
    """What a norm of this kind adds to its weights: 1 where they are stored as differences from it."""
    with torch.no_grad():
        norm.weight.zero_()
        return 1.0 if bool(norm(torch.ones_like(norm.weight)).any()) else 0.0


@torch.no_grad()
def _cache_sizes(layer: TargetLayer, target: TargetInfo, folder: Path) -> dict[str, Any]:
    """Heads of queries, and of keys and values with their widths, as a pass over one token shows them."""
    sizes: dict[str, Any] = {}

    def look(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        sizes.update(heads=query.shape[1], kv_heads=key.shape[1], head_size=key.shape[3], value_size=value.shape[3])
        return attend_causally(query, key, value)

    stream = torch.zeros(1, 1, target.hidden_size, dtype=target.dtype)
    try:
        layer(stream, torch.zeros(1, 1, dtype=torch.long), look)
    except RedrafterError:
        raise
    except Exception as error:  # whatever the numbers of its configuration make of it
        raise CorruptCheckpoint(f"the MTP module in {folder} does not run: {first_line(error)}") from error
    if not sizes:
        raise UnsupportedDrafter(
            f"the MTP module in {folder} has a kind of attention that redrafter does not draft with"
        )
    return sizes


def _has_own_head(beside: dict[str, Tensor], target: TargetInfo) -> bool:
    """Whether there is another output embedding than the target's; a copy of that is removed."""
    head = beside.get("head.weight")
    if head is None:
        return False
    if embedding_shape(target.output_embedding) == tuple(head.shape):
        known = embedding_rows(target.output_embedding).cpu()
        if torch.equal(known, head.to(known.dtype)):
            del beside["head.weight"]
            return False
    return True


def _check_finite(net: EagleNet, folder: Path) -> None:
    for name, parameter in net.named_parameters():
        if not all(bool(x.isfinite()) for x in parameter.detach().aminmax()):
            raise CorruptCheckpoint(
                f"the MTP module in {folder} has numbers that are not finite ({name}); copy it again"
            )
