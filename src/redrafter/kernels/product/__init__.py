"""Linear layers as products whose rows have the same bits in every pass. See naive.py for what is computed."""

import torch
from torch import Tensor

from redrafter.kernels import runs_triton
from redrafter.kernels.product import naive
from redrafter.kernels.product.naive import parts_of

__all__ = ["parts_of", "product", "supports"]


def supports(weight: Tensor) -> bool:
    """Whether the kernel takes these weights (O, K): 16-bit floats with contiguous rows of 16, 32, 48, ... columns."""
    dtypes = (torch.bfloat16, torch.float16)
    return weight.dtype in dtypes and weight.stride(-1) == 1 and weight.shape[1] % 16 == 0


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (n, K) · weight (O, K)ᵀ + bias (O,) as partial sums (S, n, O), where S depends on the weight's shape alone.

    One part has the dtype of x; several parts are in fp32 for 16-bit weights. On a GPU with 16-bit weights a row's
    bits depend neither on n nor on the row's place among the n.
    """
    if runs_triton(x.device) and supports(weight):
        from redrafter.kernels.product import triton

        return triton.product(x, weight, bias)
    return naive.product(x, weight, bias)
