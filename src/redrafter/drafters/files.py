"""The two files of a drafter's folder, read and written. Whatever a file holds, an error is one line.

A folder may come from anybody. What is read here has the types, and its numbers the values, that the code behind it
relies on. Whether they fit each other, `checkpoint.py` checks.
"""

import json
import stat
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from redrafter.bounds import shown
from redrafter.drafters import int8
from redrafter.errors import ConfigError, CorruptCheckpoint, first_line

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
MOST_CONFIG = 2**24
"""Bytes of a configuration."""


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    try:
        check_regular(path)
        if path.stat().st_size > MOST_CONFIG:
            raise ValueError(f"it is larger than {MOST_CONFIG >> 20} MiB")
        config = json.loads(path.read_text(), object_pairs_hook=_distinct)
    except FileNotFoundError as error:
        raise CorruptCheckpoint(f"{folder} is no drafter folder: it has no {CONFIG_FILE}") from error
    except (ValueError, OSError, RecursionError) as error:
        raise CorruptCheckpoint(f"cannot read {path}: {error}") from error
    if not isinstance(config, dict):
        raise CorruptCheckpoint(f"{path} holds no JSON object")
    return config


def read_target(config: dict[str, Any], folder: Path) -> dict[str, str]:
    """The identity of the target that a drafter was made for; empty where the configuration names none."""
    target = config.get("target", {})
    if not isinstance(target, dict) or not all(isinstance(value, str) for value in target.values()):
        raise CorruptCheckpoint(f"{folder / CONFIG_FILE}: target must be an object of texts, got {shown(target)}")
    return target


def read_number(config: dict[str, Any], name: str, folder: Path) -> int:
    """A whole number of a configuration."""
    value = config.get(name)
    if type(value) is not int:
        raise CorruptCheckpoint(f"{folder / CONFIG_FILE}: {name} must be a whole number, got {shown(value)}")
    return value


def read_tensors(folder: Path, name: str = WEIGHTS_FILE) -> dict[str, Tensor]:
    """All tensors of this file. Floats are finite and in fp32, matrices that were stored in int8 too."""
    path = folder / name
    try:
        check_regular(path)
        tensors = int8.unpack(load_file(path))
    except FileNotFoundError as error:
        raise CorruptCheckpoint(f"{folder} has no {name}") from error
    except Exception as error:  # safetensors raises many kinds
        raise CorruptCheckpoint(f"cannot read {path}: {first_line(error)}; copy it again") from error
    return finite(tensors, path)


def finite(tensors: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Floats in fp32; numbers that are not finite are refused."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            tensors[name] = tensor = tensor.float()
            if tensor.numel() and not all(x.isfinite() for x in tensor.aminmax()):
                raise CorruptCheckpoint(f"{path}: {shown(name)} has numbers that are not finite; copy it again")
    return tensors


def write_files(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], overwrite: bool = False) -> None:
    """Write both files, each moved into place when complete. Replaces existing files only with `overwrite`."""
    folder.mkdir(parents=True, exist_ok=True)
    taken = [name for name in (CONFIG_FILE, WEIGHTS_FILE) if (folder / name).exists()]
    if taken and not overwrite:
        raise ConfigError(f"{folder} already holds {' and '.join(taken)}; choose another folder or say overwrite")
    parts = {name: folder / f".{name}.part" for name in (WEIGHTS_FILE, CONFIG_FILE)}
    save_file({k: v.contiguous() for k, v in tensors.items()}, parts[WEIGHTS_FILE])
    parts[CONFIG_FILE].write_text(json.dumps(config, indent=2) + "\n")
    for name, part in parts.items():
        part.replace(folder / name)


def check_token_ids(ids: Tensor | None, count: int | None, vocab_size: int, where: str) -> None:
    """Raise unless these are `count` different token ids (None: there are none). Kernels use them as indexes."""
    if count is None or ids is None:
        if ids is not None or count is not None:
            raise CorruptCheckpoint(f"{where}: token_ids and draft_vocab_size come together, and one is missing")
        return
    if ids.dtype != torch.long or ids.shape != (count,):
        raise CorruptCheckpoint(
            f"{where}: token_ids must be {count} int64 numbers, and are {ids.dtype} of the shape {tuple(ids.shape)}"
        )
    ordered = ids.sort().values
    if ordered[0] < 0 or ordered[-1] >= vocab_size or not (ordered.diff() > 0).all():
        raise CorruptCheckpoint(f"{where}: token_ids must be different token ids from 0 to {vocab_size - 1}")


def check_regular(path: Path) -> None:
    """A pipe or a device would never end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("it is no file")


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys are different: readers do not agree which of two values counts."""
    found = dict(pairs)
    if len(found) < len(pairs):
        [(key, count)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"it has the key {shown(key)} {count} times")
    return found
