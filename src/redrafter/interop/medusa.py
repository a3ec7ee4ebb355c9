"""Medusa drafters (arXiv 2401.10774) in the layout of their authors and in that of vLLM.

The authors number the parts of each network (`0.0.linear.weight`, `0.1.weight`) and keep them in a file of their own;
vLLM names blocks and heads (`blocks.0.layers.0.weight`, `lm_heads.0.weight`) and can leave tokens out.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redrafter.drafters import files
from redrafter.drafters.medusa import MedusaConfig
from redrafter.drafters.medusa.network import RANKS
from redrafter.errors import CorruptCheckpoint, DrafterMismatch
from redrafter.interop import pickled
from redrafter.interop.decoder_layers import build, flag, made, number, tensors_of
from redrafter.interop.readings import Published, Reading
from redrafter.targets import TargetInfo
from redrafter.targets.embedding import embedding_shape

OWN_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
"""Where the authors keep the networks; the second is a pickle, of which tensors alone are read."""
MOST_BYTES = 2**36
PREFIX = re.compile(r"^medusa_heads?\.")
OLD_BLOCK, OLD_HEAD = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)"), re.compile(r"(\d+)\.(\d+)\.weight")
BLOCK, HEAD = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)"), re.compile(r"lm_heads\.(\d+)\.weight")
MOST_HEADS, MOST_BLOCKS = 64, 16


def read(folder: Path, config: Mapping[str, Any], target: TargetInfo) -> Published:
    old = "medusa_num_heads" in config or any((folder / name).exists() for name in OWN_FILES)
    tensors = _renamed({PREFIX.sub("", name): tensor for name, tensor in _tensors(folder).items()})
    for name in ("logit_scale", "medusa_logit_scale"):
        if config.get(name, 1) != 1:
            raise CorruptCheckpoint(f"{folder / files.CONFIG_FILE}: {name} must be 1")
    blocks = number(config, "medusa_num_layers" if old else "num_hidden_layers", folder, 1, MOST_BLOCKS)
    said = number(config, "medusa_num_heads" if old else "num_heads", folder, 1, MOST_HEADS)
    # The authors' files name fewer networks than they hold.
    heads = max([said, *(1 + int(match[1]) for name in tensors if old and (match := BLOCK.fullmatch(name)))])
    if heads > MOST_HEADS:
        raise CorruptCheckpoint(f"{folder} has {heads} networks, and at most {MOST_HEADS} are possible")
    _check_target(config, tensors, target, folder)
    ids = _token_ids(tensors, config, target, folder)
    one = flag(config, "original_lm_head", folder)
    if one and "lm_head.weight" not in tensors and "lm_heads.0.weight" in tensors:
        tensors["lm_head.weight"] = tensors["lm_heads.0.weight"]
    shared = tensors.pop("lm_head.weight", None) if one else None
    own = shared is not None or any(HEAD.fullmatch(name) for name in tensors)
    width = target.hidden_size
    sizes = made(
        MedusaConfig,
        folder,
        vocab_size=target.vocab_size,
        context_size=width,
        embedding_size=embedding_shape(target.input_embedding)[1],
        draft_vocab_size=None if ids is None else len(ids),
        exit_size=width,
        heads=heads,
        blocks=blocks,
        bare=True,
        head="own" if own else "tied",
    )
    if not own and embedding_shape(target.output_embedding)[1] != width:
        raise DrafterMismatch(
            f"the drafter {folder} has no output embeddings, and that of the target {target.name} does not read hidden "
            f"states of {width} numbers but of {embedding_shape(target.output_embedding)[1]}"
        )
    names = {
        f"heads.{h}.blocks.{b}.{end}": f"blocks.{h}.layers.{b}.{end}"
        for h in range(heads)
        for b in range(blocks)
        for end in ("weight", "bias")
    }
    for name in [name for name in tensors if BLOCK.fullmatch(name)]:  # vLLM's have no bias by default
        tensors.setdefault(name.replace("weight", "bias"), torch.zeros(width))
    if own:
        tensors["own"] = _heads(tensors, heads, shared, ids, (sizes.guessable, width), folder)
    if ids is not None:
        tensors["token_ids"] = ids
    # Nobody has measured these; half as often as the one before, as in a new network.
    tensors["accuracies"] = (0.5 ** torch.arange(1.0, RANKS + 1)).repeat(heads)
    net = build(sizes, tensors, names, folder)
    layout = "its authors" if old else "vLLM"
    return Published(f"Medusa in the layout of {layout}", net, (Reading(f"{heads} networks", sizes),), usual=0.3)


def _tensors(folder: Path) -> dict[str, Tensor]:
    safe, pickle = (folder / name for name in OWN_FILES)
    if safe.exists():
        return files.read_tensors(folder, safe.name)
    if pickle.exists() and not (folder / files.WEIGHTS_FILE).exists():
        return pickled.read(pickle, MOST_BYTES)
    return tensors_of(folder)


def _renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The authors' names as vLLM has them."""
    renamed = {}
    for name, tensor in tensors.items():
        if match := OLD_BLOCK.fullmatch(name):
            name = f"blocks.{match[1]}.layers.{match[2]}.{match[3]}"
        elif match := OLD_HEAD.fullmatch(name):
            name = f"lm_heads.{match[1]}.weight"
        renamed[name] = tensor
    return renamed


def _check_target(config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: TargetInfo, folder: Path) -> None:
    """A drafter for another vocabulary or width is refused with both numbers."""
    block, head = (
        None if (tensor := tensors.get(name)) is None or tensor.dim() != 2 else tensor  # `build` names a wrong shape
        for name in ("blocks.0.layers.0.weight", "lm_heads.0.weight")
    )
    width = number(config, "hidden_size", folder, target.hidden_size if block is None else max(1, block.shape[-1]))
    if width != target.hidden_size:
        raise DrafterMismatch(
            f"the drafter {folder} reads hidden states of {width} numbers, but those of the target {target.name} "
            f"have {target.hidden_size}"
        )
    known = target.vocab_size if head is None or "token_map" in tensors else max(1, len(head))
    vocab_size = number(config, "vocab_size", folder, known)
    if vocab_size != target.vocab_size:
        raise DrafterMismatch(
            f"the drafter {folder} was made for a vocabulary of {vocab_size}, but the target {target.name} has one of "
            f"{target.vocab_size}"
        )


def _token_ids(
    tensors: dict[str, Tensor], config: Mapping[str, Any], target: TargetInfo, folder: Path
) -> Tensor | None:
    """The target's token of each draft token, from `token_map`; checked by `build`."""
    ids = tensors.pop("token_map", None)
    size = number(config, "truncated_vocab_size", folder, target.vocab_size)
    if ids is None:
        if size != target.vocab_size:
            raise CorruptCheckpoint(
                f"{folder / files.WEIGHTS_FILE} has no token_map, which a draft vocabulary of {size} tokens out of "
                f"{target.vocab_size} needs"
            )
        return None
    if size == target.vocab_size:
        return None
    if ids.dtype not in (torch.int64, torch.int32) or ids.shape != (size,):
        raise CorruptCheckpoint(
            f"{folder / files.WEIGHTS_FILE}: token_map must be {size} whole numbers, and is {ids.dtype} of the shape "
            f"{tuple(ids.shape)}"
        )
    files.check_token_ids(ids.long(), size, target.vocab_size, str(folder / files.WEIGHTS_FILE))
    return ids.long()


def _heads(
    tensors: dict[str, Tensor],
    heads: int,
    shared: Tensor | None,
    ids: Tensor | None,
    shape: tuple[int, int],
    folder: Path,
) -> Tensor:
    """(heads, V', H) the output embeddings of the networks, taken from the tensors."""
    rows = []
    for h in range(heads):
        name = f"lm_heads.{h}.weight"
        head = tensors.pop(name, None)
        if shared is not None:
            name, head = "lm_head.weight", shared
        if head is None:
            raise CorruptCheckpoint(f"{folder} lacks {name!r}")
        if ids is not None and head.dim() == 2 and len(head) > len(ids) > 0 and int(ids.max()) < len(head):
            head = head[ids]
        if tuple(head.shape) != shape:
            raise CorruptCheckpoint(f"{folder}: {name} has the shape {tuple(head.shape)}, and it must be {shape}")
        rows.append(head)
    return torch.stack(rows)
