"""Linear layers as partial sums: the oracle, and into how many parts a product is split."""

import torch
import torch.nn.functional as F
from torch import Tensor

TILE = 64
"""Columns of the narrowest tile."""
PROGRAMS = 132
"""Tiles that a large GPU computes at once. The number is a constant: on every GPU the sums have the same order."""
BLOCK = 128
"""A part is a multiple of this many terms long."""


def parts_of(weight: Tensor) -> int:
    """Into how many parts the K terms of a product with weights (O, K) are split: so many that their tiles fill a GPU.

    >>> [parts_of(torch.empty(*shape)) for shape in ((4096, 11008), (12288, 4096), (576, 1536), (576, 576))]
    [2, 1, 4, 1]
    """
    width, size = weight.shape
    tiles = -(-width // TILE)
    return next((s for s in (4, 2) if tiles * s <= PROGRAMS and size % (BLOCK * s) == 0), 1)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (n, K) · weight (O, K)ᵀ + bias (O,) -> (S, n, O). The bias is in the first part."""
    count = parts_of(weight)
    if count == 1:
        return F.linear(x, weight, bias)[None]
    width, size = weight.shape
    each = x.view(len(x), count, size // count).transpose(0, 1)
    columns = weight.view(width, count, size // count).permute(1, 2, 0)
    if x.is_cuda and x.dtype != torch.float32:
        parts = torch.bmm(each, columns, out_dtype=torch.float32)
    else:
        parts = torch.bmm(each.to(_wide(x.dtype)), columns.to(_wide(x.dtype)))
    if bias is not None:
        parts[0] += bias.to(parts.dtype)
    return parts


def _wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32
