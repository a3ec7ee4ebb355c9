"""The layouts of AWQ and GPTQ: int32 words of 4 or 8 bits, with a scale and a zero point for each group of inputs."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from redrafter.bounds import shown
from redrafter.errors import CorruptCheckpoint
from redrafter.targets.quantised.files import Stored
from redrafter.targets.quantised.stored import (
    Layer,
    Parts,
    StoredLayer,
    check_kept,
    layers,
    names,
    refuse,
    spread,
    unpack,
    value,
    words,
)

ENDS = ("qweight", "qzeros", "scales", "g_idx")
AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
"""Where in a word of AWQ each of its eight columns lies."""


def read_awq(config: Mapping[str, Any], tensors: Mapping[str, Stored]) -> list[StoredLayer]:
    version, bits = value(config, "version", str, "gemm").lower(), value(config, "bits", int)
    if version != "gemm":
        raise refuse(f"AWQ {shown(version)}")
    if bits != 4:
        raise refuse(f"AWQ in {shown(bits)} bits")
    if not value(config, "zero_point", bool, True):
        raise refuse("AWQ without zero points")
    size, kept = value(config, "group_size", int), names(config, "modules_to_not_convert")
    return [_awq_layer(layer, size, kept) for layer in layers(tensors, ("qweight",), ENDS)]


def _awq_layer(layer: Layer, size: int, kept: list[str]) -> StoredLayer:
    check_kept(layer.name, kept)
    weight = layer.part("qweight", (torch.int32,))
    columns, rows = weight.shape[0], 8 * weight.shape[1]
    group, count = _groups(layer, columns, size)
    zeros = layer.part("qzeros", (torch.int32,), (count, rows // 8))
    scales = layer.part("scales", (torch.float16, torch.bfloat16, torch.float32), (count, rows))

    def ordered(packed: Tensor) -> Tensor:
        return torch.unflatten(unpack(packed, 4), -1, (-1, 8))[..., AWQ_ORDER].flatten(-2)

    def dequantised(parts: Parts, wide: torch.dtype) -> Tensor:
        return _weight(ordered(parts["qweight"]), ordered(parts["qzeros"]), parts["scales"], group, wide)

    stored = {"qweight": weight, "qzeros": zeros, "scales": scales}
    return StoredLayer(name=layer.name, shape=(rows, columns), stored=stored, weight=dequantised)


def read_gptq(config: Mapping[str, Any], tensors: Mapping[str, Stored]) -> list[StoredLayer]:
    bits, size = value(config, "bits", int), value(config, "group_size", int)
    layout = config.get("checkpoint_format") or config.get("format") or "gptq"
    if bits not in (4, 8):
        raise refuse(f"GPTQ in {shown(bits)} bits")
    if layout not in ("gptq", "gptq_v2"):
        raise refuse(f"the GPTQ layout {shown(layout)}")
    if value(config, "desc_act", bool, False):
        raise refuse("GPTQ in activation order (desc_act)")
    if any(not str(name).startswith("-:") for name in value(config, "dynamic", dict, {})):
        raise refuse("GPTQ with settings for single layers (dynamic)")
    kept = names(config, "modules_to_not_convert")
    return [_gptq_layer(layer, bits, size, layout == "gptq", kept) for layer in layers(tensors, ("qweight",), ENDS)]


def _gptq_layer(layer: Layer, bits: int, size: int, less_one: bool, kept: list[str]) -> StoredLayer:
    """`less_one`: the zero points are stored less one, as in the first version of the format."""
    check_kept(layer.name, kept)
    weight = layer.part("qweight", (torch.int32,))
    columns, rows = weight.shape[0] * 32 // bits, weight.shape[1]
    group, count = _groups(layer, columns, size)
    zeros = layer.part("qzeros", (torch.int32,), (count, words(rows, bits)))
    scales = layer.part("scales", (torch.float16, torch.bfloat16, torch.float32), (count, rows))
    if "g_idx" in layer.parts:
        index = layer.part("g_idx", (torch.int32, torch.int64), (columns,))
        if not torch.equal(index.read().long(), torch.arange(columns) // group):
            raise refuse(f"GPTQ in activation order (the g_idx of {shown(layer.name)})")

    def dequantised(parts: Parts, wide: torch.dtype) -> Tensor:
        codes = unpack(parts["qweight"].T, bits).T
        zero = unpack(parts["qzeros"], bits)[:, :rows]
        if less_one:
            zero = (zero + 1) & (2**bits - 1)
        return _weight(codes, zero, parts["scales"], group, wide)

    stored = {"qweight": weight, "qzeros": zeros, "scales": scales}
    return StoredLayer(name=layer.name, shape=(rows, columns), stored=stored, weight=dequantised)


def _groups(layer: Layer, columns: int, size: int) -> tuple[int, int]:
    """How many inputs a group has, and how many groups there are."""
    group = columns if size == -1 else size
    if group < 1 or columns % group:
        raise CorruptCheckpoint(f"the layer {shown(layer.name)} has {columns} inputs, no groups of {shown(size)}")
    return group, columns // group


def _weight(codes: Tensor, zeros: Tensor, scales: Tensor, group: int, wide: torch.dtype) -> Tensor:
    """(inputs, outputs) codes, (groups, outputs) zero points and scales -> (outputs, inputs)."""
    inputs, outputs = codes.shape
    block = (group, 1)
    made = codes.to(wide).sub_(spread(zeros.to(wide), inputs, outputs, block))
    return made.mul_(spread(scales.to(wide), inputs, outputs, block)).T.contiguous()
