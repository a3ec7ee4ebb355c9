"""The format of compressed-tensors, which llm-compressor writes and vLLM and SGLang load: packed integers and fp8."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from redrafter.bounds import shown
from redrafter.errors import CorruptCheckpoint
from redrafter.targets.quantised.files import Stored
from redrafter.targets.quantised.fine_fp8 import block_of, blocks
from redrafter.targets.quantised.linear import Rounding
from redrafter.targets.quantised.stored import (
    SCALES,
    Layer,
    Parts,
    StoredLayer,
    layers,
    names,
    refuse,
    spread,
    unpack,
    value,
    words,
)

PACKED = "pack-quantized"
PLAIN = ("int-quantized", "float-quantized", "naive-quantized")
"""Formats whose weights are one byte each."""
ENDS = ("weight_packed", "weight", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "input_scale")
MOST_PATTERN, MOST_NAME, MOST_PATTERNS = 200, 128, 64
"""Characters of a pattern and of a name, and patterns of a configuration."""
MOST_REPEATS, MOST_ALTERNATIVES, MOST_GROUPS = 3, 8, 2
"""In a pattern. The time of a match grows with the length of the name to the power of the repeats, and doubles with
each choice: more could take for ever."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """How the weights of a group of layers are stored."""

    bits: int
    is_float: bool
    symmetric: bool
    packed: bool
    block: tuple[int, int] | None
    """Rows and columns that share a scale, 0 for all of them; None: all weights share one."""

    def sizes(self, shape: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
        """Of a matrix of this shape: the size of a block, and how many blocks it has in each direction."""
        rows, columns = self.block or (0, 0)
        block = (rows or shape[0], columns or shape[1])
        return block, blocks(shape, block)

    def dequantise(self, parts: Parts, shape: tuple[int, int], wide: torch.dtype) -> Tensor:
        block, grid = self.sizes(shape)
        offset = 1 << (self.bits - 1)  # packed values are unsigned
        if self.packed:
            made = unpack(parts["weight_packed"], self.bits)[:, : shape[1]].to(wide) - offset
        else:
            made = parts["weight"].to(wide)
        if not self.symmetric:
            zero = parts["weight_zero_point"]
            zero = unpack(zero.T, self.bits).T[: grid[0]].to(wide) - offset if zero.dtype == torch.int32 else zero
            made.sub_(spread(zero.to(wide).reshape(grid), *shape, block))
        return made.mul_(spread(parts["weight_scale"].to(wide).reshape(grid), *shape, block))


@dataclass(frozen=True)
class Targets:
    """The layers that a configuration means, by their names and by patterns."""

    names: frozenset[str]
    patterns: tuple[re.Pattern[str], ...]

    @classmethod
    def of(cls, given: list[str]) -> "Targets":
        """
        >>> targets = Targets.of(["lm_head", "re:.*mlp.gate$"])
        >>> [targets.name(x) or targets.match(x) for x in ("lm_head", "model.layers.0.mlp.gate", "a")]
        [True, True, False]
        """
        patterns = [each for each in given if each.startswith("re:")]
        if len(patterns) > MOST_PATTERNS:
            raise CorruptCheckpoint(
                f"its quantization_config has {len(patterns)} patterns; at most {MOST_PATTERNS} are read"
            )
        return cls(frozenset(given) - frozenset(patterns), tuple(map(_pattern, patterns)))

    def name(self, layer: str) -> bool:
        return layer in self.names

    def match(self, layer: str) -> bool:
        if self.patterns and len(layer) > MOST_NAME:
            raise CorruptCheckpoint(
                f"the layer {shown(layer)} has a name of {len(layer)} characters; patterns are tried on at most "
                f"{MOST_NAME}"
            )
        return any(pattern.match(layer) for pattern in self.patterns)


@dataclass(frozen=True)
class Group:
    """Layers that are quantised alike."""

    targets: Targets
    weights: Weights
    rounding: Rounding | None


def read(config: Mapping[str, Any], tensors: Mapping[str, Stored]) -> list[StoredLayer]:
    for name in ("sparsity_config", "transform_config"):
        given = value(config, name, dict, {})
        if given and given.get("format") != "dense":
            raise refuse(f"a {name}")
    groups = [_group(each, config) for each in value(config, "config_groups", dict).values()]
    ignored = Targets.of(names(config, "ignore"))
    found = []
    for layer in layers(tensors, ("weight_packed", "weight_scale"), ENDS):
        if ignored.name(layer.name) or ignored.match(layer.name):
            raise CorruptCheckpoint(f"the layer {shown(layer.name)} is quantised, and its configuration ignores it")
        found.append(_layer(layer, _group_of(layer.name, groups)))
    return found


def _pattern(target: str) -> re.Pattern[str]:
    """A pattern that is matched in a bounded time."""
    pattern = target.removeprefix("re:")
    repeats = len(re.findall(r"[*+?{]+", pattern))
    hard = (
        repeats > MOST_REPEATS
        or pattern.count("|") > MOST_ALTERNATIVES
        or pattern.count("(") > MOST_GROUPS
        or re.search(r"\)[*+?{]|\\[1-9]|\(\?", pattern)  # a repeated group, a reference to one, an extension
    )
    if len(pattern) > MOST_PATTERN or hard:
        raise CorruptCheckpoint(f"its quantization_config has the pattern {shown(target)}, which is too complex")
    try:
        return re.compile(pattern)
    except (re.error, OverflowError) as error:
        raise CorruptCheckpoint(
            f"its quantization_config has the pattern {shown(target)}, which is none ({error})"
        ) from None


def _group_of(name: str, groups: list[Group]) -> Group:
    """A name goes before a pattern, and a pattern before a class of modules."""
    for means in (Targets.name, Targets.match, lambda targets, _: targets.name("Linear")):
        for group in groups:
            if means(group.targets, name):
                return group
    raise CorruptCheckpoint(f"the layer {shown(name)} is quantised, and no group of its configuration means it")


def _group(given: Any, config: Mapping[str, Any]) -> Group:
    if not isinstance(given, dict):
        raise CorruptCheckpoint(f"its quantization_config has the group {shown(given)}, no object")
    layout = given.get("format") or config.get("format")
    if layout not in (PACKED, *PLAIN):
        raise refuse(f"the format {shown(layout)}")
    if given.get("output_activations") is not None:
        raise refuse("rounded outputs of layers")
    weights, inputs = value(given, "weights", dict), value(given, "input_activations", dict, {})
    return Group(Targets.of(names(given, "targets")), _weights(weights, layout), _rounding(inputs) if inputs else None)


def _strategy(given: Mapping[str, Any]) -> tuple[str, int | None]:
    """What shares a scale, and the size of a group; the size alone may say it."""
    size = given.get("group_size")
    if size is not None and (type(size) is not int or size < -1 or size == 0):
        raise CorruptCheckpoint(f"its quantization_config has group_size = {shown(size)}, no size of a group")
    inferred = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = value(given, "strategy", str, inferred).lower()
    if strategy == "group" and (size is None or size < 1):
        raise CorruptCheckpoint(f"its quantization_config has groups of {shown(size)}")
    return strategy, size


def _weights(given: Mapping[str, Any], layout: str) -> Weights:
    bits, kind = value(given, "num_bits", int, 8), value(given, "type", str, "int").lower()
    packed, symmetric = layout == PACKED, value(given, "symmetric", bool, True)
    strategy, size = _strategy(given)
    if kind not in ("int", "float"):
        raise refuse(f"numbers of the type {shown(kind)}")
    if bits not in ((4, 8) if packed else (8,)) or (kind == "float" and (packed or not symmetric)):
        raise refuse(f"{shown(bits)}-bit {kind} weights in the format {layout}")
    if given.get("actorder") not in (None, False, "weight", "static"):
        raise refuse(f"activation order ({shown(given['actorder'])})")
    if strategy == "block":
        block = block_of(given.get("block_structure"))
        if block is None:
            raise CorruptCheckpoint("its quantization_config has blocks without a block_structure")
    elif strategy in ("tensor", "channel", "group"):
        block = {"tensor": None, "channel": (1, 0)}.get(strategy, (1, size or 0))
    else:
        raise refuse(f"a scale for each {shown(strategy)}")
    return Weights(bits=bits, is_float=kind == "float", symmetric=symmetric, packed=packed, block=block)


def _rounding(given: Mapping[str, Any]) -> Rounding:
    bits, kind = value(given, "num_bits", int, 8), value(given, "type", str, "int").lower()
    strategy, size = _strategy(given)
    if bits != 8 or kind not in ("int", "float") or not value(given, "symmetric", bool, True):
        raise refuse(f"{shown(bits)}-bit {shown(kind)} activations, or ones with a zero point")
    to: Literal["fp8", "int8"] = "fp8" if kind == "float" else "int8"
    dynamic = given.get("dynamic") or False
    if dynamic is False and strategy == "tensor":
        return Rounding(to=to, static=True)
    if dynamic is True and strategy in ("token", "group"):
        return Rounding(to=to, group=size if strategy == "group" else None)
    raise refuse(f"activation scales for each {shown(strategy)}, dynamic = {shown(dynamic)}")


def _layer(layer: Layer, group: Group) -> StoredLayer:
    weights = group.weights
    if "weight_g_idx" in layer.parts:
        raise refuse(f"activation order (the weight_g_idx of {shown(layer.name)})")
    if weights.packed:
        weight = layer.part("weight_packed", (torch.int32,))
        said = layer.part("weight_shape", (torch.int64, torch.int32), (2,)).read().tolist()
        shape = (said[0], said[1])
        if min(shape) < 1 or weight.shape != (shape[0], words(shape[1], weights.bits)):
            raise weight.wrong(f"has the shape {weight.shape}, and its layer the shape {shape}")
    else:
        weight = layer.part("weight", (torch.float8_e4m3fn if weights.is_float else torch.int8,))
        shape = (weight.shape[0], weight.shape[1])
    block, grid = weights.sizes(shape)
    if weights.block is not None and weights.block[0] == 1 and shape[1] % block[1]:
        raise CorruptCheckpoint(f"the layer {shown(layer.name)} has {shape[1]} inputs, no groups of {block[1]}")
    flat = [grid[:1], ()] if grid == (1, 1) else [grid[:1]] if grid[1] == 1 else []
    stored = {"weight_packed" if weights.packed else "weight": weight}
    stored["weight_scale"] = layer.part("weight_scale", SCALES, grid, *flat)
    if not weights.symmetric:
        zero = layer.part(
            "weight_zero_point", (torch.int32, torch.int8), grid, *flat, (words(grid[0], weights.bits), grid[1])
        )
        is_packed = zero.shape == (words(grid[0], weights.bits), grid[1]) and zero.dtype == torch.int32
        if not is_packed and zero.dtype != torch.int8:
            raise zero.wrong(f"has the shape {zero.shape} and the type {zero.dtype}, which do not fit each other")
        if zero.dtype == torch.int8 and zero.shape not in (grid, *flat):
            raise zero.wrong(f"has the shape {zero.shape}, and its scales the shape {grid}")
        stored["weight_zero_point"] = zero
    static = group.rounding is not None and group.rounding.static
    return StoredLayer(
        name=layer.name,
        shape=shape,
        stored=stored,
        weight=lambda parts, wide: weights.dequantise(parts, shape, wide),
        rounding=group.rounding,
        input_scale=layer.part("input_scale", SCALES, (1,), ()) if static else None,
    )
