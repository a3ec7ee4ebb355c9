"""int8 weights for drafters on a CPU: a quarter of the bytes to read for each guess.

Rounding changes some guesses and never the text. The network keeps its own weights beside the rounded ones: they are
saved, and they are used for inputs that are not a few tokens in fp32.
"""

import functools
from collections.abc import Callable
from types import MethodType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redrafter.kernels import runs_cpp
from redrafter.kernels.cpu import ops

SCALE = ".scale"
"""Suffix of the tensor that holds a packed matrix's scales."""


def round_rows(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix as int8 and one fp32 scale a row. What was rounded once is not changed by a second time."""
    matrix = matrix.detach().float()
    scale = (matrix.abs().amax(1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
    return (matrix / scale[:, None]).round().to(torch.int8), scale


def pack(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every matrix as int8 with one fp32 scale a row; all else as it is.

    >>> packed = pack({"w": torch.tensor([[1.0, -0.5], [0.0, 0.0]])})
    >>> packed["w"].tolist(), unpack(packed)["w"].tolist()
    ([[127, -64], [0, 0]], [[1.0, -0.5039370059967041], [0.0, 0.0]])
    """
    packed = {}
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.dim() == 2:
            packed[name], packed[name + SCALE] = round_rows(tensor)
        else:
            packed[name] = tensor
    return packed


def unpack(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse, up to rounding; tensors that were never packed pass through."""
    whole = {k: v for k, v in tensors.items() if not k.endswith(SCALE)}
    for name in whole:
        if name + SCALE in tensors:
            whole[name] = whole[name].float() * tensors[name + SCALE][:, None]
    return whole


def usable_for(weight: Tensor) -> bool:
    """Whether the int8 kernel runs for weights of this dtype on this device."""
    return weight.dtype == torch.float32 and runs_cpp(weight.device)


def product(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """x -> x · weightᵀ, with int8 weights where x has few rows."""
    rounded = functools.cache(lambda: round_rows(weight))  # when first needed: a compiled search needs none

    def multiply(x: Tensor) -> Tensor:
        return ops.linear_int8(x, *rounded()) if ops.usable(x) else F.linear(x, weight)

    return multiply


def replace_linears(net: nn.Module) -> None:
    """Give every linear layer of the network a forward with int8 weights."""
    for module in net.modules():
        if isinstance(module, nn.Linear):
            module.forward = MethodType(_linear(module.weight), module)  # type: ignore[method-assign]


def _linear(weight: Tensor) -> Callable[[nn.Linear, Tensor], Tensor]:
    rounded = functools.cache(lambda: round_rows(weight))

    def forward(self: nn.Linear, input: Tensor) -> Tensor:
        if ops.usable(input):
            return ops.linear_int8(input, *rounded(), self.bias)
        return F.linear(input, self.weight, self.bias)

    return forward
