"""A drafter on disk: `config.json` (its shape and its target's identity) and `model.safetensors`."""

import dataclasses
import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from redrafter.config import DrafterConfig, EagleConfig, MedusaConfig, RecurrentConfig
from redrafter.errors import ConfigError, CorruptCheckpoint, DrafterMismatch
from redrafter.nets.eagle import EagleNet
from redrafter.nets.medusa import MedusaNet
from redrafter.nets.recurrent import RecurrentNet
from redrafter.targets import TargetInfo

log = logging.getLogger(__name__)

Net = RecurrentNet | MedusaNet | EagleNet
KINDS: dict[str, tuple[type[DrafterConfig], type[Net]]] = {
    "redrafter_recurrent": (RecurrentConfig, RecurrentNet),
    "redrafter_medusa": (MedusaConfig, MedusaNet),
    "redrafter_eagle": (EagleConfig, EagleNet),
}
"""By the `model_type` in a folder's config."""
CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
SCALE = ".scale"
OTHERWISE = "the text stays exact, guesses may be fewer"


def identity(target: TargetInfo) -> dict[str, str]:
    """What a drafter must agree with (tokenizer) and had better agree with (weights)."""
    weight = target.output_embedding.weight.detach()
    sample = weight[:: max(1, weight.shape[0] // 64)].bfloat16().cpu()  # rounded: the same in every dtype
    digest = hashlib.sha256(sample.view(torch.int16).numpy().tobytes()).hexdigest()
    result = {"name": target.name, "weights": digest[:16]}
    if target.tokenizer is not None:
        vocabulary = json.dumps(sorted(target.tokenizer.get_vocab().items()))
        result["tokenizer"] = hashlib.sha256(vocabulary.encode()).hexdigest()[:16]
    return result


def compare(made_for: dict[str, str], target: TargetInfo, what: str, otherwise: str) -> None:
    """Another tokenizer is an error; for other weights (a fine-tune, a quantised copy) a warning says what it costs."""
    own = identity(target)
    name = made_for.get("name", "an unnamed target")
    if "tokenizer" in made_for and "tokenizer" in own and made_for["tokenizer"] != own["tokenizer"]:
        raise DrafterMismatch(
            f"{what} was made for the tokenizer of {name} ({made_for['tokenizer']}), but the target {target.name} has "
            f"another ({own['tokenizer']})"
        )
    if "weights" in made_for and made_for["weights"] != own["weights"]:
        log.warning("%s was made for %s; %s has other weights: %s", what, name, target.name, otherwise)


def make(config: DrafterConfig) -> Net:
    """A network of this shape, with weights yet to be learned."""
    net = next(net for shape, net in KINDS.values() if isinstance(config, shape))
    return net(config)  # type: ignore[arg-type]


def model_type(net: Net) -> str:
    return next(name for name, (_, kind) in KINDS.items() if isinstance(net, kind))


def read_for(folder: Path, target: TargetInfo) -> Net:
    """The drafter in a folder, for a target of the same tokenizer."""
    net, made_for = read(folder)
    compare(made_for, target, f"the drafter {folder}", OTHERWISE)
    return net


def write(folder: Path, net: Net, target: TargetInfo, overwrite: bool = False, storage: str = "exact") -> None:
    """`storage`: `exact`, or `int8` for matrices of a quarter the size, rounded row by row."""
    config = {
        "model_type": model_type(net),
        "target": identity(target),
        "drafter": dataclasses.asdict(net.config),
    }
    tensors = net.state_dict()
    write_files(folder, config, pack_int8(tensors) if storage == "int8" else tensors, overwrite)


def pack_int8(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every matrix as int8 with one fp32 scale a row; all else as it is.

    >>> packed = pack_int8({"w": torch.tensor([[1.0, -0.5], [0.0, 0.0]])})
    >>> packed["w"].tolist(), unpack_int8(packed)["w"].tolist()
    ([[127, -64], [0, 0]], [[1.0, -0.5039370059967041], [0.0, 0.0]])
    """
    packed = {}
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.dim() == 2:
            packed[name], packed[name + SCALE] = round_rows(tensor)
        else:
            packed[name] = tensor
    return packed


def round_rows(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix as int8 and one fp32 scale a row. What was rounded once is not changed by a second time."""
    matrix = matrix.detach().float()
    scale = (matrix.abs().amax(1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
    return (matrix / scale[:, None]).round().to(torch.int8), scale


def unpack_int8(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inverse, up to rounding; tensors that were never packed pass through."""
    whole = {k: v for k, v in tensors.items() if not k.endswith(SCALE)}
    for name in whole:
        if name + SCALE in tensors:
            whole[name] = whole[name].float() * tensors[name + SCALE][:, None]
    return whole


def write_files(
    folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], overwrite: bool = False
) -> None:
    """Both files, each moved into place whole; what lies there already only if asked for."""
    folder.mkdir(parents=True, exist_ok=True)
    taken = [name for name in (CONFIG_FILE, WEIGHTS_FILE) if (folder / name).exists()]
    if taken and not overwrite:
        raise ConfigError(f"{folder} already holds {' and '.join(taken)}; choose another folder or say overwrite")
    parts = {name: folder / f".{name}.part" for name in (WEIGHTS_FILE, CONFIG_FILE)}
    save_file({k: v.contiguous() for k, v in tensors.items()}, parts[WEIGHTS_FILE])
    parts[CONFIG_FILE].write_text(json.dumps(config, indent=2) + "\n")
    for name, part in parts.items():
        part.replace(folder / name)


def read(folder: Path) -> tuple[Net, dict[str, str]]:
    """The network and the identity of the target it was made for."""
    config = read_config(folder)
    if config.get("model_type") not in KINDS:
        raise CorruptCheckpoint(
            f"{folder / CONFIG_FILE} is not a drafter of ours: model_type is {config.get('model_type')!r}, expected "
            f"{' or '.join(map(repr, KINDS))}"
        )
    return described(config, KINDS[config["model_type"]][0], folder), dict(config.get("target", {}))


def described(config: dict[str, Any], kind: type[DrafterConfig], folder: Path) -> Net:
    """The network that `drafter` in a configuration describes, with the folder's weights."""
    try:
        shape = dict(config["drafter"])
        shape["layers"] = tuple(shape["layers"])
        net = make(kind(**shape))
    except (KeyError, TypeError, ConfigError) as error:
        raise CorruptCheckpoint(f"{folder / CONFIG_FILE} does not describe a drafter: {error}") from error
    load_weights(net, unpack_int8(read_tensors(folder)), folder)
    return net


def read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG_FILE).read_text())
    except FileNotFoundError as error:
        raise CorruptCheckpoint(f"{folder} is no drafter folder: it has no {CONFIG_FILE}") from error
    except (ValueError, OSError) as error:
        raise CorruptCheckpoint(f"cannot read {folder / CONFIG_FILE}: {error}") from error
    if not isinstance(config, dict):
        raise CorruptCheckpoint(f"{folder / CONFIG_FILE} holds no JSON object")
    return config


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(folder / WEIGHTS_FILE)
    except FileNotFoundError as error:
        raise CorruptCheckpoint(f"{folder} has no {WEIGHTS_FILE}") from error
    except (SafetensorError, OSError) as error:
        raise CorruptCheckpoint(f"cannot read {folder / WEIGHTS_FILE}: {error}; copy it again") from error


def load_weights(net: Net, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    try:
        net.load_state_dict(tensors)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise CorruptCheckpoint(f"{folder / WEIGHTS_FILE} does not fit its {CONFIG_FILE}: {reason}") from error
