"""FP8 checkpoints as DeepSeek and Qwen publish them: weights in blocks with a scale each, activations in groups."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from redrafter.bounds import shown
from redrafter.errors import CorruptCheckpoint
from redrafter.targets.quantised.files import Stored
from redrafter.targets.quantised.linear import Rounding
from redrafter.targets.quantised.stored import (
    SCALES,
    Layer,
    Parts,
    StoredLayer,
    check_kept,
    layers,
    names,
    refuse,
    spread,
    value,
)

BLOCKS, WHOLE = "weight_scale_inv", "weight_scale"
"""The scales of blocks, and of a whole matrix. Both are multiplied with the weights, whatever the first one's name."""


def read(config: Mapping[str, Any], tensors: Mapping[str, Stored]) -> list[StoredLayer]:
    kind, activations = value(config, "fmt", str, "e4m3"), value(config, "activation_scheme", str, "dynamic")
    block = block_of(config.get("weight_block_size"))
    if kind != "e4m3":
        raise refuse(f"FP8 numbers {shown(kind)}")
    if config.get("scale_fmt") not in (None, "float"):
        raise refuse(f"FP8 scales of the format {shown(config['scale_fmt'])}")
    if activations != ("static" if block is None else "dynamic"):
        blocks = "without blocks" if block is None else "in blocks"
        raise refuse(f"FP8 weights {blocks} and activation scales {shown(activations)}")
    kept = names(config, "modules_to_not_convert", "ignored_layers")
    ends = ("weight", BLOCKS, WHOLE, "input_scale")
    return [_layer(layer, block, kept) for layer in layers(tensors, (BLOCKS, WHOLE), ends)]


def block_of(given: Any) -> tuple[int, int] | None:
    """Rows and columns of a block; None if the configuration has none."""
    if given is None:
        return None
    if not isinstance(given, list) or len(given) != 2 or not all(type(n) is int and n > 0 for n in given):
        raise CorruptCheckpoint(f"its quantization_config has blocks of {shown(given)}, no [rows, columns]")
    return given[0], given[1]


def blocks(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    """How many blocks a matrix has in each direction.

    >>> blocks((300, 256), (128, 128))
    (3, 2)
    """
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def _layer(layer: Layer, block: tuple[int, int] | None, kept: list[str]) -> StoredLayer:
    check_kept(layer.name, kept)
    weight = layer.part("weight", (torch.float8_e4m3fn,))
    shape = (weight.shape[0], weight.shape[1])
    if block is None:
        scale = layer.part(WHOLE, SCALES, (1,), ())
        rounding = Rounding(to="fp8", static=True)
        input_scale = layer.part("input_scale", SCALES, (1,), ())
        grid, block = (1, 1), shape
    else:
        grid = blocks(shape, block)
        scale = layer.part(BLOCKS, SCALES, grid)
        rounding, input_scale = Rounding(to="fp8", group=block[1]), None
    size = block

    def dequantised(parts: Parts, wide: torch.dtype) -> Tensor:
        scales = parts["scale"].to(wide).reshape(grid)
        return parts["weight"].to(wide).mul_(spread(scales, *shape, size))

    stored = {"weight": weight, "scale": scale}
    return StoredLayer(
        name=layer.name, shape=shape, stored=stored, weight=dequantised, rounding=rounding, input_scale=input_scale
    )
