"""Rounds a model's own weights to 4 bits or to fp8: to the nearest value, with the best of several scales a block."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from redrafter.errors import UnsupportedTarget
from redrafter.targets.quantised.compressed_tensors import PACKED, Weights
from redrafter.targets.quantised.files import FLOATS, Stored
from redrafter.targets.quantised.linear import FP8_MOST, Rounding
from redrafter.targets.quantised.stored import Parts, StoredLayer, pack

Scheme = Literal["int4", "fp8"]
SCHEMES: tuple[Scheme, ...] = ("int4", "fp8")
SIZES = (128, 64, 32)
"""Columns that share a scale, and for fp8 as many rows: the first that divides all of a model's matrices."""
ROUTERS = ("gate", "router", "shared_expert_gate")
"""The last names of small layers that choose experts. Engines keep them as they are, and so does redrafter."""
EXPERT = re.compile(r"\.experts\.\d+\.\w+\.weight$")
"""Matrices that transformers joins to one tensor for all experts."""
CHUNK = 1 << 22
"""Weights that are searched at once: bounds the memory."""
INT4_FACTORS = [0.6 + 0.025 * i for i in range(19)]
"""Scales that are tried, relative to the one with which the largest weight becomes 7."""
FP8_FACTORS = [2 ** (i / 8) for i in range(-1, 8)]
"""The same for fp8, whose own steps repeat with every factor of 2: an octave, and a little clipping."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Which matrices of a model are quantised, and how."""

    scheme: Scheme
    size: int
    """Of groups (int4), or of blocks in both directions (fp8)."""
    matrices: frozenset[str]
    ignored: tuple[str, ...]
    """Linear layers that stay as they are."""

    @property
    def weights(self) -> Weights:
        is_float = self.scheme == "fp8"
        block = (self.size, self.size) if is_float else (1, self.size)
        return Weights(bits=8 if is_float else 4, is_float=is_float, symmetric=True, packed=not is_float, block=block)

    @property
    def rounding(self) -> Rounding | None:
        return Rounding(to="fp8", group=self.size) if self.scheme == "fp8" else None

    def quantised(self, weight: Tensor) -> Parts:
        """The parts of a layer as the checkpoint stores them."""
        return _int4(weight, self.size) if self.scheme == "int4" else _fp8(weight, self.size)

    def layer(self, name: str, stored: Stored) -> StoredLayer:
        """The layer as if it came from a checkpoint that has been quantised."""
        weights, shape = self.weights, (stored.shape[0], stored.shape[1])
        return StoredLayer(
            name=name,
            shape=shape,
            stored={"weight": stored},
            weight=lambda parts, wide: weights.dequantise(self.quantised(parts["weight"]), shape, wide),
            rounding=self.rounding,
        )

    def config(self) -> dict[str, Any]:
        """The `quantization_config` of compressed-tensors."""
        is_float = self.scheme == "fp8"
        bits, kind = (8, "float") if is_float else (4, "int")
        common: dict[str, Any] = {"num_bits": bits, "type": kind, "symmetric": True}
        if self.scheme == "int4":
            layout, inputs = PACKED, None
            weights = common | {"strategy": "group", "group_size": self.size, "dynamic": False}
        else:
            layout = "float-quantized"
            weights = common | {"strategy": "block", "block_structure": [self.size, self.size], "dynamic": False}
            inputs = common | {"strategy": "group", "group_size": self.size, "dynamic": True}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
        return {
            "quant_method": "compressed-tensors",
            "format": layout,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group | {"format": layout}},
            "ignore": list(self.ignored),
            "kv_cache_scheme": None,
        }


def plan(scheme: Scheme, tree: Any, tensors: Mapping[str, Stored]) -> Plan:
    """Linear layers of decoder layers and experts are quantised; embeddings, heads, norms and routers stay.

    `tree` is the model without weights, which knows which tensors belong to linear layers.
    """
    head = tree.get_output_embeddings()
    linear = {name for name, module in tree.named_modules() if type(module) is nn.Linear and module is not head}
    matrices, ignored = [], [name for name, module in tree.named_modules() if module is head]
    for name, stored in tensors.items():
        layer = name.removesuffix(".weight")
        is_linear = layer != name and (layer in linear or EXPERT.search(name) is not None)
        router = layer.rpartition(".")[2] in ROUTERS
        if is_linear and not router and len(stored.shape) == 2 and stored.dtype in FLOATS and _fits(scheme, stored, 32):
            matrices.append(layer)
        elif is_linear or (router and layer != name):
            ignored.append(layer)
    if not matrices:
        raise UnsupportedTarget("it has no linear layers whose sizes are multiples of 32, so nothing can be quantised")
    size = next(n for n in SIZES if all(_fits(scheme, tensors[f"{name}.weight"], n) for name in matrices))
    return Plan(scheme=scheme, size=size, matrices=frozenset(matrices), ignored=tuple(ignored))


def _fits(scheme: Scheme, stored: Stored, size: int) -> bool:
    rows, columns = stored.shape
    return columns % size == 0 and (scheme == "int4" or rows % size == 0)


def _int4(weight: Tensor, size: int) -> Parts:
    kind = weight.dtype if weight.dtype in (torch.bfloat16, torch.float16) else torch.bfloat16
    codes, scales = torch.empty(weight.shape, dtype=torch.uint8), torch.empty(len(weight), weight.shape[1] // size)
    for part in _pieces(weight, 1):
        groups = torch.unflatten(weight[part].float(), 1, (-1, size))
        base = groups.abs().amax(2, keepdim=True) / 7
        scale = _best(groups, base, INT4_FACTORS, lambda x: x.round().clamp(-8, 7), kind)
        codes[part] = ((groups / scale).round().clamp(-8, 7) + 8).to(torch.uint8).flatten(1)
        scales[part] = scale.squeeze(2)
    return {
        "weight_packed": pack(codes),
        "weight_scale": scales.to(kind),
        "weight_shape": torch.tensor(weight.shape),
    }


def _fp8(weight: Tensor, size: int) -> Parts:
    made = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(len(weight) // size, weight.shape[1] // size)
    for part in _pieces(weight, size):
        blocks = torch.unflatten(torch.unflatten(weight[part].float(), 1, (-1, size)), 0, (-1, size))
        blocks = blocks.transpose(1, 2).flatten(2)
        base = blocks.abs().amax(2, keepdim=True) / FP8_MOST
        scale = _best(blocks, base, FP8_FACTORS, lambda x: _to_fp8(x).float(), torch.float32)
        rounded = torch.unflatten(_to_fp8(blocks / scale), 2, (size, size)).transpose(1, 2)
        made[part] = rounded.flatten(2).flatten(0, 1)
        scales[part.start // size : part.stop // size] = scale.squeeze(2)
    return {"weight": made, "weight_scale": scales}


def _to_fp8(x: Tensor) -> Tensor:
    return x.clamp(-FP8_MOST, FP8_MOST).to(torch.float8_e4m3fn)


def _pieces(weight: Tensor, step: int) -> list[slice]:
    """The rows in pieces of bounded size, each a multiple of `step` rows."""
    rows = max(1, CHUNK // (weight.shape[1] * step)) * step
    return [slice(i, min(i + rows, len(weight))) for i in range(0, len(weight), rows)]


def _best(
    groups: Tensor, base: Tensor, factors: list[float], nearest: Callable[[Tensor], Tensor], kind: torch.dtype
) -> Tensor:
    """(m, n, values) weights -> (m, n, 1) fp32: the scales with the least squared error, as `kind` stores them."""
    best, least = torch.ones_like(base), torch.full_like(base, torch.inf)
    for factor in factors:
        scale = (base * factor).to(kind).float()
        scale = torch.where(scale > 0, scale, 1.0)  # of weights that are all zeros
        error = (nearest(groups / scale) * scale - groups).square().sum(2, keepdim=True)
        better = error < least
        best, least = torch.where(better, scale, best), torch.where(better, error, least)
    return best
