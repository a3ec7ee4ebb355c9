"""Residual sums, RMS norms and the MLP's gate in plain torch: the oracle."""

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Activation = Literal["silu", "gelu_tanh"]


class Norm(NamedTuple):
    """x / rms(x) · (weight + offset)."""

    weight: Tensor  # (H,)
    offset: float
    eps: float

    def __call__(self, wide: Tensor) -> Tensor:
        """Of fp32 values (..., H), in fp32.

        >>> Norm(torch.ones(2), 0.0, 0.0)(torch.tensor([3.0, 4.0]))
        tensor([0.8485, 1.1314])
        """
        unit = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return unit * (self.weight.float() + self.offset)


def add_norm(
    x: Tensor, parts: Tensor | None, after: Norm | None, before: Norm | None, into: Tensor | None = None
) -> Tensor:
    """Residual stream (n, H), parts (S, n, H) of a product -> what the next product reads (n, H).

    The parts' sum, normed by `after` if given, is added to x and the result written to `into`, which may be x. The
    result is returned, normed by `before` if given. Without parts x itself is normed. Each step is rounded once.
    """
    y = x
    if parts is not None:
        assert into is not None
        new = parts.float().sum(0)
        if after is not None:
            new = after(new).to(x.dtype).float()
        y = into.copy_(x.float() + new)
    return y if before is None else before(y.float()).to(x.dtype)


def gate(parts: Tensor, dtype: torch.dtype, activation: Activation = "silu") -> Tensor:
    """Parts (S, n, 2·I) -> activation(first half) · second half, rounded once."""
    opening, what = parts.float().sum(0).chunk(2, dim=-1)
    opening = F.silu(opening) if activation == "silu" else F.gelu(opening, approximate="tanh")
    return (opening * what).to(dtype)
