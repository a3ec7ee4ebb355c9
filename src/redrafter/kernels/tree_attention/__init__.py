"""Attention of tree nodes over the KV cache and over each other. See naive.py for what it computes."""

import torch
from torch import Tensor

from redrafter.kernels import runs_triton
from redrafter.kernels.tree_attention import naive
from redrafter.kernels.tree_attention.naive import Rotary


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    packed: Tensor,
    scaling: float,
    turn: Rotary | None,
    counters: dict[torch.device, Tensor],
) -> Tensor:
    """Queries (B, G·K, n, D) of n nodes on the cache (P, K, S, D) and their own keys (B, K, n, D) -> (B, n, G·K, D).

    `counters` belongs to the cache and is filled here: the kernel's programs count their arrivals in it, so two passes
    that run at the same time must not share one.
    """
    if not runs_triton(query.device):
        return naive.attend(query, key, value, keys, values, packed, scaling, turn).contiguous()
    from redrafter.kernels.tree_attention import triton

    if query.device not in counters:
        counters[query.device] = torch.zeros(triton.PROGRAMS, dtype=torch.int32, device=query.device)
    return triton.attend(query, key, value, keys, values, packed, counters[query.device], scaling, turn)
