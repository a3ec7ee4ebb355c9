"""The operations between a decoder layer's products: residual sums, RMS norms and the MLP's gate. See naive.py."""

import torch
from torch import Tensor

from redrafter.kernels import runs_triton
from redrafter.kernels.norm_gate import naive
from redrafter.kernels.norm_gate.naive import Activation, Norm

__all__ = ["Activation", "Norm", "add_norm", "gate"]


def add_norm(
    x: Tensor, parts: Tensor | None, after: Norm | None, before: Norm | None, into: Tensor | None = None
) -> Tensor:
    """(n, H) plus the sum of parts (S, n, H), which `after` norms, written to `into`; then normed by `before`."""
    if runs_triton(x.device):
        from redrafter.kernels.norm_gate import triton

        return triton.add_norm(x, parts, after, before, into)
    return naive.add_norm(x, parts, after, before, into)


def gate(parts: Tensor, dtype: torch.dtype, activation: Activation = "silu") -> Tensor:
    """Parts (S, n, 2·I) of a product -> (n, I): activation(first half) · second half."""
    if runs_triton(parts.device):
        from redrafter.kernels.norm_gate import triton

        return triton.gate(parts, dtype, activation)
    return naive.gate(parts, dtype, activation)
