"""The operations between a decoder layer's products: RMS norm and the MLP's gate. See naive.py."""

from torch import Tensor

from redrafter.kernels import runs_triton
from redrafter.kernels.norm_gate import naive


def norm(
    x: Tensor, weight: Tensor, offset: float, eps: float, parts: Tensor | None = None, into: Tensor | None = None
) -> Tensor:
    """(n, H) -> its RMS norm; with parts (S, n, H), the norm of x plus their sum, which is also written to `into`."""
    if runs_triton(x.device):
        from redrafter.kernels.norm_gate import triton

        return triton.norm(x, weight, offset, eps, parts, into)
    return naive.norm(x, weight, offset, eps, parts, into)


def gate(joint: Tensor) -> Tensor:
    """(n, 2·I) -> (n, I): silu(first half) · second half."""
    if runs_triton(joint.device):
        from redrafter.kernels.norm_gate import triton

        return triton.gate(joint)
    return naive.gate(joint)
