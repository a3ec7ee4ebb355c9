"""Head norms, rotation and the write to the KV cache in plain torch: the oracle."""

from typing import NamedTuple

import torch
from torch import Tensor

from redrafter.kernels.tree_attention.naive import write


class HeadNorms(NamedTuple):
    """RMS norms of queries and keys."""

    queries: Tensor  # scales (D,) of each head, or (H·D,) of all heads together
    keys: Tensor
    offset: float  # added to the scales
    eps: float


class Heads(NamedTuple):
    """How a layer's heads lie in its first product: queries, keys, values, head by head."""

    queries: int
    keys: int
    size: int
    norms: HeadNorms | None = None


def rotate(
    parts: Tensor, cos: Tensor, sin: Tensor, heads: Heads, keys: Tensor, values: Tensor, lines: Tensor
) -> Tensor:
    """Partial sums (S, T, (H + 2·K)·D), cos and sin (T, R) -> rotated queries (T, H, D).

    The first R ≤ D values of a head are rotated, first half against second. Queries and keys are rounded once. Keys and
    values go to the cache (P, K, S, D), where the lines (T, COLUMNS) say.
    """
    whole = parts.float().sum(0).view(len(lines), -1, heads.size)
    query, key, value = torch.split(whole, [heads.queries, heads.keys, heads.keys], dim=1)
    if heads.norms is not None:
        query = _normed(query, heads.norms.queries, heads.norms)
        key = _normed(key, heads.norms.keys, heads.norms)
    query, key = (_turned(x, cos, sin).to(keys.dtype) for x in (query, key))
    write(key, value.to(values.dtype), keys, values, lines)
    return query


def _normed(x: Tensor, scales: Tensor, norms: HeadNorms) -> Tensor:
    """Heads (T, K, D), normed over D, or over K·D where the scales are that long."""
    rows = x if len(scales) == x.shape[-1] else x.flatten(1)
    unit = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + norms.eps)
    return (unit * (scales.float() + norms.offset)).view_as(x)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned = cos.shape[-1]
    first, second = x[..., :turned].chunk(2, dim=-1)
    across = torch.cat([-second, first], dim=-1)
    rotated = x[..., :turned] * cos[:, None].float() + across * sin[:, None].float()
    return torch.cat([rotated, x[..., turned:]], dim=-1)
