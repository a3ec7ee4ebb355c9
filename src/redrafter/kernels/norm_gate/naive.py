"""RMS norm and the MLP's gate in plain torch: the oracle."""

import torch
import torch.nn.functional as F
from torch import Tensor


def norm(
    x: Tensor, weight: Tensor, offset: float, eps: float, parts: Tensor | None = None, into: Tensor | None = None
) -> Tensor:
    """(n, H) -> x / rms(x) · (weight + offset), rounded once.

    With parts (S, n, H), their sum is added to x first and the result written to `into`, which may be x.

    >>> norm(torch.tensor([3.0, 4.0]), torch.ones(2), 0.0, 0.0)
    tensor([0.8485, 1.1314])
    """
    wide = x.float()
    if parts is not None:
        assert into is not None
        wide = into.copy_(wide + parts.float().sum(0)).float()
    unit = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (unit * (weight.float() + offset)).to(x.dtype)


def gate(joint: Tensor) -> Tensor:
    """(..., 2·I) -> silu(first half) · second half, rounded once."""
    opening, what = joint.float().chunk(2, dim=-1)
    return (F.silu(opening) * what).to(joint.dtype)
