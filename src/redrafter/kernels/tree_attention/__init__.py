"""Attention of tree nodes over the KV cache and over each other. See naive.py for what it computes."""

import torch
from torch import Tensor

from redrafter.kernels import runs_triton
from redrafter.kernels.tree_attention import naive


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    packed: Tensor,
    scaling: float,
    counters: dict[torch.device, Tensor],
) -> Tensor:
    """Queries (B, n, G·K, D) of n nodes on the cache (P, K, S, D), which holds their keys -> (B, n, G·K, D).

    `counters` belongs to the cache and is filled here: the kernel's programs count their arrivals in it, so two passes
    that run at the same time must not share one. On a GPU, the nodes of a tree less than 16 deep get the bits of plain
    decoding.
    """
    if not runs_triton(query.device):
        return naive.attend(query, keys, values, packed, scaling).contiguous()
    from redrafter.kernels.tree_attention import triton

    if query.device not in counters:
        counters[query.device] = torch.zeros(triton.COUNTERS, dtype=torch.int32, device=query.device)
    return triton.attend(query, keys, values, packed, counters[query.device], scaling)


def pack_mask(
    lengths: Tensor,
    depths: Tensor,
    mask: Tensor | None,
    window: int | None = None,
    places: Tensor | None = None,
    deep: int = naive.NEWEST - 1,
) -> Tensor:
    """(B,) lengths, (B, n) depths, (B, n, n) ancestors -> (B, 1, n, ...) int64: the packed mask of naive.py."""
    if not runs_triton(lengths.device):
        return naive.pack_mask(lengths, depths, mask, window, places, deep)
    from redrafter.kernels.tree_attention import triton_mask

    return triton_mask.pack_mask(lengths, depths, mask, window, places, deep)
