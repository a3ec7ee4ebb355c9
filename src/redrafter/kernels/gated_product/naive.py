"""A product and its gate: the oracle."""

from torch import Tensor

from redrafter.kernels.norm_gate.naive import Activation, gate
from redrafter.kernels.product.naive import product


def gated_product(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Activation = "silu") -> Tensor:
    """x (n, K) · weight (2·I, K)ᵀ + bias (2·I,) -> activation(first half) · second half (n, I)."""
    return gate(product(x, weight, bias), x.dtype, activation)
