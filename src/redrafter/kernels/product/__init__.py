"""Linear layers as products whose rows have the same bits in every pass. See naive.py for what is computed."""

import torch
from torch import Tensor

from redrafter.kernels import runs_triton
from redrafter.kernels.product import naive
from redrafter.kernels.product.naive import parts_of

__all__ = ["parts_of", "product", "supports"]


def supports(weight: Tensor) -> bool:
    """Whether the kernel takes these weights (O, K): plain 16-bit floats, rows of 16, 32, 48, ... at 16 bytes each."""
    plain = type(weight) in (Tensor, torch.nn.Parameter) and weight.dtype in (torch.bfloat16, torch.float16)
    if not plain or weight.stride(-1) != 1 or weight.shape[1] % 16:
        return False
    return weight.stride(0) % 8 == 0 and weight.data_ptr() % 16 == 0


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (n, K) · weight (O, K)ᵀ + bias (O,) as partial sums (S, n, O), where S depends on the weight's shape alone.

    One part has the dtype of x; several parts are in fp32 for 16-bit weights. On a GPU with 16-bit weights a row's
    bits depend neither on n nor on the row's place among the n.
    """
    if runs_triton(x.device) and supports(weight):
        from redrafter.kernels.product import triton

        return triton.product(x, weight, bias)
    return naive.product(x, weight, bias)
