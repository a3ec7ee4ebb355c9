"""int8 weights for a recurrent network: see `drafters/int8.py`. Here are the parts that are not linear layers."""

import functools
from collections.abc import Callable
from types import MethodType

import torch
from torch import Tensor

from redrafter.drafters.int8 import product, replace_linears
from redrafter.drafters.recurrent.network import RecurrentNet
from redrafter.kernels.cpu import ops


def replace_layers(net: RecurrentNet) -> None:
    """Give the network's linear layers, norms and input projection forwards for a CPU."""
    replace_linears(net)
    net._unit = MethodType(_unit, net)  # type: ignore[method-assign]
    if net.input_proj is not None:
        net.columns = MethodType(_columns(net), net)  # type: ignore[method-assign]


def _unit(self: RecurrentNet, x: Tensor) -> Tensor:
    """torch's own norm without weights takes a dozen operations on a CPU."""
    if self.config.normed and ops.normable(x):
        return ops.rms_norm(x, _ones(x.shape[-1]), 0.0, torch.finfo(x.dtype).eps)
    return RecurrentNet._unit(self, x)


@functools.cache
def _ones(size: int) -> Tensor:
    return torch.ones(size)


def _columns(net: RecurrentNet) -> Callable[..., Tensor]:
    assert net.input_proj is not None
    weight = net.input_proj.weight
    parts: dict[int, Callable[..., Tensor]] = {}

    def columns(self: RecurrentNet, x: Tensor, start: int, bias: Tensor | None = None) -> Tensor:
        if not ops.usable(x):
            return RecurrentNet.columns(self, x, start, bias)
        if start not in parts:
            parts[start] = product(weight[:, start : start + x.shape[-1]])
        return parts[start](x, bias)

    return columns
