"""A quantised layer as a checkpoint stores it: its parts, its shape, and the way back to its weights."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from redrafter.bounds import shown
from redrafter.errors import CorruptCheckpoint, UnsupportedTarget
from redrafter.targets.quantised.files import Stored
from redrafter.targets.quantised.linear import Rounding

Parts = dict[str, Tensor]
"""The tensors of a layer by the ends of their names: `qweight`, `weight_scale`, ..."""
SCALES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class StoredLayer:
    """A linear layer of a checkpoint. `weight` gives (rows, columns) in at least fp32 from its parts."""

    name: str
    shape: tuple[int, int]
    stored: Mapping[str, Stored]
    weight: Callable[[Parts, torch.dtype], Tensor]
    rounding: Rounding | None = None
    """How the scheme rounds what the layer receives."""
    input_scale: Stored | None = None

    def __post_init__(self) -> None:
        if math.prod(self.shape) == 0:
            raise CorruptCheckpoint(f"the layer {shown(self.name)} has the shape {self.shape}, which is empty")
        group = self.rounding.group if self.rounding else None
        if group and self.shape[1] % group:
            raise CorruptCheckpoint(
                f"the layer {shown(self.name)} receives {self.shape[1]} values, no groups of {group}"
            )

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        """The weight, computed in fp32, or in fp64 for a model in fp64, and rounded once to `dtype`."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return self.weight({end: each.read() for end, each in self.stored.items()}, wide).to(dtype)


class Layer:
    """The parts of one layer in a checkpoint, and the checks that all formats share."""

    def __init__(self, name: str, parts: Mapping[str, Stored]) -> None:
        self.name, self.parts = name, parts

    def part(self, end: str, dtypes: Iterable[torch.dtype], *shapes: tuple[int, ...]) -> Stored:
        """A part that has one of these types, and one of these shapes; without any, two axes."""
        stored = self.parts.get(end)
        if stored is None:
            raise CorruptCheckpoint(
                f"the layer {shown(self.name)} has no {end}, which its format stores; copy it again"
            )
        if stored.dtype not in tuple(dtypes):
            raise stored.wrong(f"has the type {stored.dtype}, which its format does not use there")
        if not shapes and len(stored.shape) != 2:
            raise stored.wrong(f"has the shape {stored.shape}, and must have two axes")
        if shapes and stored.shape not in shapes:
            raise stored.wrong(f"has the shape {stored.shape}, and the rest of its layer asks for {shapes[0]}")
        return stored


def layers(tensors: Mapping[str, Stored], marks: tuple[str, ...], ends: tuple[str, ...]) -> Iterator[Layer]:
    """The layers that have a tensor with one of the endings `marks`, with all of their parts among `ends`."""
    names = {name.removesuffix(f".{mark}") for name in tensors for mark in marks if name.endswith(f".{mark}")}
    for name in sorted(names):
        yield Layer(name, {end: tensors[key] for end in ends if (key := f"{name}.{end}") in tensors})


def unpack(words: Tensor, bits: int) -> Tensor:
    """(..., n) int32 -> (..., n * 32 / bits) uint8: the values of each word, the lowest bits first.

    >>> unpack(torch.tensor([[0x76543210]], dtype=torch.int32), 4).tolist()
    [[0, 1, 2, 3, 4, 5, 6, 7]]
    """
    octets = words.reshape(-1).view(torch.uint8).view(*words.shape[:-1], -1)
    return octets if bits == 8 else torch.stack((octets & 15, octets >> 4), -1).flatten(-2)


def pack(values: Tensor) -> Tensor:
    """The inverse of `unpack` for 4 bits: (..., 8 n) uint8 -> (..., n) int32.

    >>> hex(pack(torch.arange(8, dtype=torch.uint8)).item())
    '0x76543210'
    """
    low, high = torch.unflatten(values, -1, (-1, 2)).unbind(-1)
    return (low | high << 4).contiguous().view(torch.int32)


def words(count: int, bits: int) -> int:
    """How many int32 hold so many values."""
    return -(-count * bits // 32)


def spread(scales: Tensor, rows: int, columns: int, block: tuple[int, int]) -> Tensor:
    """Scales of blocks as one for each weight, (rows, columns) or what broadcasts to it; last blocks may be smaller."""
    tall = scales.repeat_interleave(block[0], 0)[:rows] if block[0] > 1 and scales.shape[0] > 1 else scales[:rows]
    return tall.repeat_interleave(block[1], 1)[:, :columns] if block[1] > 1 and scales.shape[1] > 1 else tall


def refuse(what: str) -> UnsupportedTarget:
    return UnsupportedTarget(f"its weights are quantised with {what}, which redrafter does not read; use another copy")


def value(config: Mapping[str, Any], name: str, kind: type, default: Any = None) -> Any:
    """A value of a quantisation's configuration, of this type; without a default it must be there."""
    given = config.get(name)
    given = default if given is None else given
    if type(given) is not kind:
        raise CorruptCheckpoint(f"its quantization_config has {name} = {shown(given)}, no {kind.__name__}")
    return given


def names(config: Mapping[str, Any], *keys: str) -> list[str]:
    """A list of texts under one of these keys; empty if there is none."""
    given: Any = next((config[key] for key in keys if config.get(key) is not None), [])
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        raise CorruptCheckpoint(f"its quantization_config has {keys[0]} = {shown(given)}, no list of names")
    return given


def check_kept(layer: str, kept: Iterable[str]) -> None:
    """A layer that the configuration keeps as it is must not be quantised in the file."""
    for name in kept:
        if f".{name}." in f".{layer}.":
            raise CorruptCheckpoint(
                f"the layer {shown(layer)} is quantised, and its configuration excludes {shown(name)}"
            )
