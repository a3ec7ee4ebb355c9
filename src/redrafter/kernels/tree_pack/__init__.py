"""Packing: the N best nodes of a draft as a tree in arrays. See naive.py."""

import torch
from torch import Tensor

from redrafter.kernels import runs_triton
from redrafter.kernels.tree_pack import naive
from redrafter.kernels.tree_pack.naive import Packed, ancestors

__all__ = ["MOST", "ancestors", "pack"]

MOST = 1024
"""Most nodes of a row before packing that the kernel takes: one program compares all of them with each other."""


def pack(
    tokens: Tensor, parents: Tensor, depths: Tensor, scores: Tensor, last: Tensor, budget: int, length: int
) -> Packed:
    """See naive.py."""
    if runs_triton(tokens.device) and scores.dtype == torch.float32 and 0 < tokens.shape[1] <= MOST:
        found: Packed = _pack(tokens, parents, depths, scores, last, budget, length)
        return found
    return naive.pack(tokens, parents, depths, scores, last, budget, length)


@torch.library.custom_op("redrafter::tree_pack", mutates_args=())
def _pack(
    tokens: Tensor, parents: Tensor, depths: Tensor, scores: Tensor, last: Tensor, budget: int, length: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from redrafter.kernels.tree_pack import triton

    return triton.pack(tokens, parents, depths, scores, last, budget, length)


@_pack.register_fake
def _(
    tokens: Tensor, parents: Tensor, depths: Tensor, scores: Tensor, last: Tensor, budget: int, length: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch, total = tokens.shape
    n = min(budget, total) + 1
    made = [tokens.new_empty(batch, n, dtype=torch.long) for _ in range(3)]
    valid = tokens.new_empty(batch, n, dtype=torch.bool)
    mask = tokens.new_empty(batch, n, n, dtype=torch.bool)
    place = tokens.new_empty(batch, total + 1, dtype=torch.long)
    return made[0], made[1], made[2], valid, mask, place, scores.new_empty(batch, n)
