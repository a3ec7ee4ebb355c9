"""A drafter on disk: `config.json` (its sizes and its target's identity) and `model.safetensors`."""

import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from redrafter.bounds import shown
from redrafter.drafters import int8, registry
from redrafter.drafters.base import DrafterConfig, DrafterNet
from redrafter.drafters.files import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    check_token_ids,
    read_config,
    read_target,
    read_tensors,
    write_files,
)
from redrafter.errors import ConfigError, CorruptCheckpoint, DrafterMismatch
from redrafter.targets import TargetInfo
from redrafter.targets.budget import Budget
from redrafter.targets.embedding import embedding_rows, embedding_shape

log = logging.getLogger(__name__)

PREFIX = "redrafter_"
"""A checkpoint's `model_type` is this and the kind's name."""
OTHERWISE = "the text stays exact, guesses may be fewer"
"""What a drafter costs on a target with other weights."""


def identity(target: TargetInfo) -> dict[str, str]:
    """Hashes of the tokenizer, which a drafter must share, and of the weights, which it should share."""
    count = embedding_shape(target.output_embedding)[0]
    ids = torch.arange(0, count, max(1, count // 64))
    sample = embedding_rows(target.output_embedding, ids).cpu()
    result = {
        "name": target.name,
        "weights": _hash(sample.bfloat16().view(torch.int16)),
        "signs": _hash(torch.signbit(sample)),  # the same in every dtype; a weight rounded twice is not
    }
    if target.tokenizer is not None:
        result["tokenizer"] = _tokenizer_hash(target.tokenizer)
    return result


_hashed: WeakKeyDictionary[Any, tuple[int, str]] = WeakKeyDictionary()
"""Tokenizers with the size of their vocabulary and their hash, which takes a third of a second."""


def _tokenizer_hash(tokenizer: Any) -> str:
    now = len(tokenizer) if hasattr(tokenizer, "__len__") else len(tokenizer.get_vocab())  # the first is fast
    size, found = _hashed.get(tokenizer, (0, ""))
    if size != now:
        found = hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()[:16]
        _hashed[tokenizer] = (now, found)
    return found


def _hash(numbers: Tensor) -> str:
    return hashlib.sha256(numbers.numpy().tobytes()).hexdigest()[:16]


def same_weights(one: dict[str, str], other: dict[str, str]) -> bool:
    """Whether two identities are of the same weights, possibly in different dtypes. Older identities have no signs."""
    name = "signs" if "signs" in one and "signs" in other else "weights"
    return one.get(name) == other.get(name)


def compare(made_for: dict[str, str], target: TargetInfo, what: str, otherwise: str) -> None:
    """Raise for another tokenizer; for other weights (a fine-tune, a quantised copy) warn: `otherwise` is the cost."""
    own = identity(target)
    name = made_for.get("name", "an unnamed target")
    if "tokenizer" in made_for and "tokenizer" in own and made_for["tokenizer"] != own["tokenizer"]:
        raise DrafterMismatch(
            f"{what} was made for the tokenizer of {name} ({made_for['tokenizer']}), but the target {target.name} has "
            f"another ({own['tokenizer']})"
        )
    if "weights" in made_for and not same_weights(made_for, own):
        log.warning("%s was made for %s; %s has other weights: %s", what, name, target.name, otherwise)


def make(config: DrafterConfig) -> DrafterNet:
    """A network of these sizes, with untrained weights."""
    return registry.get(config.kind).network(config)


def model_type(net: DrafterNet) -> str:
    return PREFIX + net.config.kind


def is_drafter(config: dict[str, Any]) -> bool:
    """Whether a folder's configuration is that of one of the registered drafter kinds."""
    return _kind(config) is not None


def _kind(config: dict[str, Any]) -> str | None:
    found = config.get("model_type")
    return next((name for name in registry.names() if found == PREFIX + name), None)


def read_for(folder: Path, target: TargetInfo) -> DrafterNet:
    """The network in a folder. The target must have the tokenizer that the network was trained for."""
    net, made_for = read(folder)
    compare(made_for, target, f"the drafter {folder}", OTHERWISE)
    return net


def write(folder: Path, net: DrafterNet, target: TargetInfo, overwrite: bool = False, storage: str = "exact") -> None:
    """`storage`: `exact`, or `int8`: matrices rounded row by row to a quarter of the size."""
    sizes, tensors = net.complete()
    config = {
        "model_type": model_type(net),
        "target": identity(target),
        "drafter": dataclasses.asdict(sizes),
    }
    write_files(folder, config, int8.pack(tensors) if storage == "int8" else tensors, overwrite)


def read(folder: Path) -> tuple[DrafterNet, dict[str, str]]:
    """The network and the identity of the target it was made for."""
    config = read_config(folder)
    kind = _kind(config)
    if kind is None:
        known = " or ".join(repr(PREFIX + name) for name in registry.names())
        raise CorruptCheckpoint(
            f"{folder / CONFIG_FILE} is not a redrafter checkpoint: model_type is {shown(config.get('model_type'))}, "
            f"expected {known}"
        )
    return build(config, registry.get(kind).config, folder), read_target(config, folder)


class _Uninitialised(Budget):
    """Modules made within it keep the memory they got: random weights would take as long as reading the real ones.

    torch's meta device would do the same, but its arithmetic imports SymPy and torch._dynamo, which takes seconds.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__module__", None) == nn.init.__name__:
            return args[0] if args else (kwargs or {})["tensor"]
        return super().__torch_function__(func, types, args, kwargs)


def build(config: dict[str, Any], kind: type[DrafterConfig], folder: Path) -> DrafterNet:
    """The network that the `drafter` entry of a configuration describes, with the folder's weights."""
    described = config.get("drafter")
    try:
        if not isinstance(described, dict):
            raise ConfigError(f"drafter must be an object, got {shown(described)}")
        sizes = kind(**described)
    except (TypeError, ConfigError) as error:
        reason = str(error).splitlines()[0][:200]
        raise CorruptCheckpoint(f"{folder / CONFIG_FILE} does not describe a drafter: {reason}") from error
    tensors = read_tensors(folder)
    net = network(sizes, tensors, folder)
    load_weights(net, tensors, folder)
    return net


def network(sizes: DrafterConfig, tensors: dict[str, Tensor], folder: Path) -> DrafterNet:
    """A network of these sizes for these tensors, which `load_weights` puts into it."""
    check_token_ids(tensors.get("token_ids"), sizes.draft_vocab_size, sizes.vocab_size, str(folder / WEIGHTS_FILE))
    try:
        with _Uninitialised(sum(tensor.numel() for tensor in tensors.values())):
            return make(sizes)
    except CorruptCheckpoint as error:
        raise CorruptCheckpoint(f"the drafter {folder} is damaged: {error}") from error


def shapes(sizes: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """The tensors of a network of these sizes. Nothing is allocated."""
    with torch.device("meta"), _Uninitialised(2**63):
        return {name: tuple(tensor.shape) for name, tensor in make(sizes).state_dict().items()}


def load_weights(net: nn.Module, tensors: dict[str, Tensor], folder: Path) -> None:
    own = net.state_dict()
    try:
        for name, tensor in own.items():
            given = tensors.get(name, tensor).dtype
            if not (given == tensor.dtype or (given.is_floating_point and tensor.is_floating_point())):
                raise RuntimeError(f"{name} is of the type {given} and must be {tensor.dtype}")
        net.load_state_dict(tensors)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise CorruptCheckpoint(f"{folder / WEIGHTS_FILE} does not fit its {CONFIG_FILE}: {reason}") from error
