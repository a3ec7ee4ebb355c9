"""What stands between a layer's products, a kernel each on a GPU. See naive.py for what they compute."""

from torch import Tensor

from redrafter.kernels import runs_triton
from redrafter.kernels.norm_gate import naive


def norm(
    x: Tensor, weight: Tensor, offset: float, eps: float, parts: Tensor | None = None, into: Tensor | None = None
) -> Tensor:
    """(n, H) -> the same, normed; with parts (S, n, H), x and their sum, which also goes `into` a tensor."""
    if runs_triton(x.device):
        from redrafter.kernels.norm_gate import triton

        return triton.norm(x, weight, offset, eps, parts, into)
    return naive.norm(x, weight, offset, eps, parts, into)


def gate(joint: Tensor) -> Tensor:
    """(n, 2·I) -> (n, I)."""
    if runs_triton(joint.device):
        from redrafter.kernels.norm_gate import triton

        return triton.gate(joint)
    return naive.gate(joint)
