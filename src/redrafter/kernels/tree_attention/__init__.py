"""Attention of a flat pass over the KV cache. See naive.py for what it computes, and for the format of a pass."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from redrafter.kernels import runs_triton
from redrafter.kernels.tree_attention import naive


@dataclass(frozen=True)
class Tiles:
    """How the kernel divides a pass: the same for all layers with the same heads."""

    runs: Tensor  # (R, 2), of the pass
    table: Tensor | None = None  # the queries of each program; None where no kernel runs
    settings: dict[str, Any] = field(default_factory=dict)  # the kernel's launch parameters


def tiles(runs: Tensor, tokens: int, heads: int, kv_heads: int, size: int, slots: int, dtype: torch.dtype) -> Tiles:
    """Divide a pass of this many tokens, for `heads` queries of `size` values and a cache of so many `slots`.

    A kernel writes the table, which `attend` reads before it waits for the kernel before it: something else must run
    in between.
    """
    if not runs_triton(runs.device):
        return Tiles(runs)
    from redrafter.kernels.tree_attention import triton

    return Tiles(runs, *triton.tiles(runs, tokens, heads, kv_heads, size, slots, dtype))


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lines: Tensor,
    tiles: Tiles,
    scaling: float,
    counters: dict[torch.device, Tensor],
) -> Tensor:
    """Queries (T, G·K, D) on the cache (P, K, S, D), which holds the tokens' keys -> (T, G·K, D).

    The result of padding is arbitrary. `counters` belongs to the cache and is filled here: the kernel's programs count
    their arrivals in it, so two passes that run at the same time must not share one. On a GPU a token's result has the
    same bits in every pass.
    """
    if tiles.table is None:
        return naive.attend(query, keys, values, lines, tiles.runs, scaling)
    from redrafter.kernels.tree_attention import triton

    if query.device not in counters:
        counters[query.device] = torch.zeros(triton.COUNTERS, dtype=torch.int32, device=query.device)
    arrivals = counters[query.device]
    return triton.attend(query, keys, values, lines, tiles.table, tiles.settings, arrivals, scaling)
