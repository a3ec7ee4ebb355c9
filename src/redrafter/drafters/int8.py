"""A drafter on a CPU: its matrices in int8, a quarter of the bytes to read for each guess.

Rounding changes guesses a little and texts never. The network's own weights stay beside the rounded ones, to be saved
and for whatever is not few tokens in fp32.
"""

import functools
from collections.abc import Callable
from types import MethodType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redrafter.drafters.checkpoint import round_rows
from redrafter.kernels import runs_cpp
from redrafter.kernels.cpu import ops
from redrafter.nets.recurrent import RecurrentNet

Product = Callable[[Tensor], Tensor]


def fits(x: Tensor) -> bool:
    """Is there anything to gain for weights like these?"""
    return x.dtype == torch.float32 and runs_cpp(x.device)


def rounded(weight: Tensor) -> Product:
    """x -> x · weightᵀ, of int8 weights where x has few rows."""
    packed, scale = round_rows(weight)

    def product(x: Tensor) -> Tensor:
        return ops.linear_int8(x, packed, scale) if ops.usable(x) else F.linear(x, weight)

    return product


def lean_linears(net: nn.Module) -> None:
    """Every linear layer of a network that we loaded ourselves. The text is in no danger: see above."""
    for module in net.modules():
        if isinstance(module, nn.Linear):
            module.forward = MethodType(_linear(module.weight), module)  # type: ignore[method-assign]


def lean(net: RecurrentNet) -> None:
    """The same for a recurrent network, with what it does besides."""
    lean_linears(net)
    net._unit = MethodType(_unit, net)  # type: ignore[method-assign]
    if net.input_proj is not None:
        net.columns = MethodType(_columns(net), net)  # type: ignore[method-assign]


def _linear(weight: Tensor) -> Callable[[nn.Linear, Tensor], Tensor]:
    packed, scale = round_rows(weight)

    def forward(self: nn.Linear, input: Tensor) -> Tensor:
        if ops.usable(input):
            return ops.linear_int8(input, packed, scale, self.bias)
        return F.linear(input, self.weight, self.bias)

    return forward


def _unit(self: RecurrentNet, x: Tensor) -> Tensor:
    """torch's own norm without weights is a dozen operations on a CPU."""
    if self.config.normed and ops.normable(x):
        return ops.rms_norm(x, _ones(x.shape[-1]), 0.0, torch.finfo(x.dtype).eps)
    return RecurrentNet._unit(self, x)


@functools.cache
def _ones(size: int) -> Tensor:
    return torch.ones(size)


def _columns(net: RecurrentNet) -> Callable[..., Tensor]:
    assert net.input_proj is not None
    packed, scale = round_rows(net.input_proj.weight)
    parts: dict[int, Tensor] = {}

    def columns(self: RecurrentNet, x: Tensor, start: int, bias: Tensor | None = None) -> Tensor:
        if not ops.usable(x):
            return RecurrentNet.columns(self, x, start, bias)
        if start not in parts:
            parts[start] = packed[:, start : start + x.shape[-1]].contiguous()
        return ops.linear_int8(x, parts[start], scale, bias)

    return columns
