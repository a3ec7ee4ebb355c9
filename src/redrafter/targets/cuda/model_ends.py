"""What stands before and behind a model's layers: rotary tables, the last norm, the head."""

from typing import Any

import torch
from torch import Tensor

from redrafter.kernels import norm_gate
from redrafter.kernels.norm_gate import Norm
from redrafter.kernels.product import product
from redrafter.targets.target import Target

LONGEST = 1 << 17
"""The largest context of a model that gets a rotary table."""


class RotaryTable:
    """A rotary module's cos and sin, computed once for all positions and then read."""

    def __init__(self, target: Target, forward: Any) -> None:
        self.forward, self.size = forward, target.max_positions
        self.tables: dict[Any, tuple[Tensor, ...]] = {}

    def __call__(self, x: Tensor, position_ids: Tensor, *kind: Any) -> tuple[Tensor, ...]:
        key = (*kind, x.dtype)
        if key not in self.tables:
            every = torch.arange(self.size, device=x.device)[None]
            self.tables[key] = tuple(t[0].contiguous() for t in self.forward(x[:1, :1], every, *kind))
        return tuple(t[position_ids] for t in self.tables[key])


class LastNorm:
    """The RMS norm behind the last layer."""

    def __init__(self, norm: Norm) -> None:
        self.norm = norm

    def __call__(self, hidden_states: Tensor) -> Tensor:
        return norm_gate.add_norm(hidden_states.flatten(0, -2), None, None, self.norm).view_as(hidden_states)


class Head:
    """The output embedding."""

    def __init__(self, head: Any) -> None:
        self.head = head

    def __call__(self, hidden_states: Tensor) -> Tensor:
        parts = product(hidden_states.flatten(0, -2), self.head.weight, self.head.bias)
        whole = parts[0]
        for part in parts[1:]:  # in their order; a library's sum may have another
            whole = whole + part
        return whole.to(hidden_states.dtype).view(*hidden_states.shape[:-1], -1)
