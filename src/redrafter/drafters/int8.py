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
from redrafter.kernels.cpu.packed import Memory, PackedMatrix, quantise

SCALE = ".scale"
"""Suffix of the tensor that holds a packed matrix's scales."""
GROUP = 32
"""Inputs that share a scale in a product."""


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
    for name, matrix in whole.items():
        scale = tensors.get(name + SCALE)
        if scale is not None:
            if matrix.dim() != 2 or matrix.dtype != torch.int8 or scale.shape != matrix.shape[:1]:
                raise ValueError(f"{name} is no int8 matrix with a scale for each row")
            whole[name] = matrix.float() * scale[:, None]
    return whole


def usable_for(weight: Tensor) -> bool:
    """Whether the int8 kernel runs for weights of this dtype on this device."""
    return weight.dtype == torch.float32 and runs_cpp(weight.device)


def product(weight: Tensor, memory: Memory | None = None) -> Callable[..., Tensor]:
    """(x, bias) -> x · weightᵀ + bias, with int8 weights in groups of 32 inputs where x has few rows."""
    fits = weight.shape[1] % GROUP == 0

    @functools.cache
    def packed() -> PackedMatrix:  # when first needed: a compiled search needs none
        return PackedMatrix(quantise(weight.detach().numpy(), 8), memory)

    def multiply(x: Tensor, bias: Tensor | None = None) -> Tensor:
        if not (fits and ops.usable(x)):
            return F.linear(x, weight, bias)
        made = packed().multiply(x)
        return made if bias is None else made.add_(bias)

    return multiply


def replace_linears(net: nn.Module) -> None:
    """Give every linear layer of the network a forward with int8 weights."""
    memory = Memory()
    for module in net.modules():
        if isinstance(module, nn.Linear):
            module.forward = MethodType(_linear(product(module.weight, memory)), module)  # type: ignore[method-assign]


def _linear(multiply: Callable[..., Tensor]) -> Callable[[nn.Linear, Tensor], Tensor]:
    def forward(self: nn.Linear, input: Tensor) -> Tensor:
        return multiply(input, self.bias)

    return forward
