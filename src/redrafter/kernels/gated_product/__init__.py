"""An MLP's first product and its gate in one kernel. See naive.py for what is computed."""

from torch import Tensor

from redrafter.kernels import runs_triton
from redrafter.kernels.gated_product import naive
from redrafter.kernels.norm_gate import Activation
from redrafter.kernels.product import supports

__all__ = ["gated_product"]


def gated_product(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Activation = "silu") -> Tensor:
    """x (n, K) · weight (2·I, K)ᵀ + bias (2·I,), gated -> (n, I). Bits as `product` and `norm_gate.gate` give them."""
    if runs_triton(x.device) and supports(weight):
        from redrafter.kernels.gated_product import triton

        return triton.gated_product(x, weight, bias, activation)
    return naive.gated_product(x, weight, bias, activation)
