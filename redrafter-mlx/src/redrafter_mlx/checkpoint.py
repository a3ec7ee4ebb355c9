"""A drafter on disk: redrafter's folders (fp32 or int8) and Apple's, read as they are."""

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from redrafter_mlx.errors import ConfigError, CorruptCheckpoint, DrafterMismatch, ModelNotFound
from redrafter_mlx.network import RecurrentConfig, RecurrentNet

log = logging.getLogger(__name__)

MODEL_TYPE, APPLE_TYPE = "redrafter_recurrent", "recurrent_drafting_drafter"
CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
SCALE = ".scale"  # suffix of the tensor that holds the scales of a matrix stored as int8, one for each row
SHIPPED = Path(__file__).parent / "shipped"


def read(folder: Path) -> tuple[RecurrentNet, dict[str, str]]:
    """The network and the identity of the target it was made for; Apple's folders name none."""
    config_file, weights_file = folder / CONFIG_FILE, folder / WEIGHTS_FILE
    if not folder.is_dir():
        raise ModelNotFound(f"there is no drafter folder {folder}")
    if not config_file.is_file():
        raise CorruptCheckpoint(f"{folder} is no drafter folder: it has no {CONFIG_FILE}")
    try:
        config = dict(json.loads(config_file.read_text()))
    except (ValueError, TypeError, OSError) as error:
        raise CorruptCheckpoint(f"cannot read {config_file}: {error}") from error
    kind = config.get("model_type")
    if kind not in (MODEL_TYPE, APPLE_TYPE):
        raise CorruptCheckpoint(
            f"{config_file} is no recurrent drafter: model_type is {kind!r}, expected {MODEL_TYPE!r} or {APPLE_TYPE!r}"
        )
    try:
        if kind == MODEL_TYPE:
            sizes = RecurrentConfig(**config["drafter"] | {"layers": tuple(config["drafter"]["layers"])})
        else:
            sizes = apple_config(config)
        net = RecurrentNet(sizes)
    except (KeyError, TypeError, ValueError, ConfigError) as error:
        raise CorruptCheckpoint(f"{config_file} does not describe a drafter: {error}") from error
    weights = read_weights(weights_file)
    try:
        net.load_weights(list((from_apple(weights, sizes) if kind == APPLE_TYPE else weights).items()))
    except (KeyError, ValueError) as error:
        reason = str(error).replace("\n", " ")
        raise CorruptCheckpoint(f"{weights_file} does not fit its {CONFIG_FILE}: {reason}") from error
    return net, dict(config.get("target", {}))


def read_weights(path: Path) -> dict[str, mx.array]:
    """All tensors; matrices stored as int8 with a scale for each row become fp32."""
    try:
        stored = dict(mx.load(str(path)))
        mx.eval(stored)
    except (OSError, RuntimeError, ValueError, TypeError) as error:
        raise CorruptCheckpoint(f"cannot read {path}: {str(error).splitlines()[0]}; copy it again") from error
    weights = {name: w for name, w in stored.items() if not name.endswith(SCALE)}
    for name in weights:
        if name + SCALE in stored:
            weights[name] = weights[name].astype(mx.float32) * stored[name + SCALE][:, None]
        elif weights[name].dtype == mx.int64:  # token ids
            weights[name] = weights[name].astype(mx.int32)
    return weights


def apple_config(config: dict[str, Any]) -> RecurrentConfig:
    hidden = int(config["hidden_size"])
    return RecurrentConfig(
        vocab_size=int(config["vocab_size"]),
        context_size=hidden,
        embedding_size=hidden,
        state_size=hidden,
        exit_size=int(config["exit_dim"]),
        blocks=int(config["num_draft_layers"]),
        cell="rnn" if config["rnn"] else "none",
        first_state="zero",
    )


def from_apple(weights: dict[str, mx.array], config: RecurrentConfig) -> dict[str, mx.array]:
    """Apple's names -> ours, and their joint vector [h, s] -> our [s, h]."""
    names = {f"lm_head.{config.blocks}.weight": "head.weight"}
    for i in range(config.blocks):
        names |= {f"lm_head.{i}.linear.{part}": f"blocks.{i}.{part}" for part in ("weight", "bias")}
    names |= {"rnn_u.weight": "cell_u.weight", "rnn_u.bias": "cell_u.bias", "rnn_w.weight": "cell_w.weight"}
    own = {names.get(name, name): w for name, w in weights.items()}
    joint = 2 * config.context_size
    if "input_proj.weight" in own:
        swapped = ["input_proj.weight"]
    else:
        swapped = ["head.weight", *(name for name in own if name.startswith("blocks."))]
    for name in swapped:
        first = 1 if name in ("input_proj.weight", "head.weight") else 0  # their rows are no joint vector
        for axis in range(first, own[name].ndim):
            if own[name].shape[axis] == joint:  # exchange the halves
                own[name] = mx.roll(own[name], config.context_size, axis=axis)
    return own


def identity(vocabulary: dict[str, int] | None, rows: np.ndarray) -> dict[str, str]:
    """Hashes of the tokenizer, which a drafter must share, and of weights, which it should share.

    `rows`: every (V // 64)-th row of the output embedding, whose signs are the same in every dtype.
    """
    found = {"signs": hashlib.sha256(np.signbit(rows).tobytes()).hexdigest()[:16]}
    if vocabulary is not None:
        spelled = json.dumps(sorted(vocabulary.items()))
        found["tokenizer"] = hashlib.sha256(spelled.encode()).hexdigest()[:16]
    return found


def compare(made_for: dict[str, str], own: dict[str, str], what: str, name: str) -> None:
    """Raise for another tokenizer; for other weights (a fine-tune, a quantised copy) say what that costs."""
    whose = made_for.get("name", "an unnamed target")
    if "tokenizer" in made_for and "tokenizer" in own and made_for["tokenizer"] != own["tokenizer"]:
        raise DrafterMismatch(
            f"{what} was made for the tokenizer of {whose} ({made_for['tokenizer']}), but the target {name} has "
            f"another ({own['tokenizer']})"
        )
    if "signs" in made_for and made_for["signs"] != own["signs"]:
        log.warning(
            "%s was made for %s; %s has other weights: the text stays exact, guesses may be fewer", what, whose, name
        )


def find_shipped(own: dict[str, str], quantised: bool) -> Path | None:
    """The folder of the shipped drafter for this tokenizer and, unless the target is quantised, these weights."""
    for config in sorted(SHIPPED.glob(f"*/{CONFIG_FILE}")):
        made_for = json.loads(config.read_text())["target"]
        same = made_for.get("signs") == own["signs"] or quantised
        if same and own.get("tokenizer") == made_for["tokenizer"]:
            return config.parent
    return None
