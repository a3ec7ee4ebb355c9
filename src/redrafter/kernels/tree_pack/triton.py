"""Packing in one launch, one program per row.

A node's rank is the number of nodes that come before it, so no sort is needed. torch.compile would fuse the oracle into
one kernel that computes each lowered score from its parent's by a new copy of the whole expression, 2^L copies for
beams of length L: that kernel alone took ten seconds to compile.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from redrafter.kernels.launch import indices, submit
from redrafter.kernels.tree_pack.naive import Packed

PAIRS = 4096
"""Nodes that are compared with each other at once."""


@triton.jit
def _lowered(scores, parents, at, real, p_node, s_node, length):
    """The smallest score on the path to each node; -inf for nodes that do not exist, and for NaN, which has no rank."""
    score = tl.load(scores + at * s_node, mask=real, other=-float("inf"))
    score = tl.where(score == score, score, -float("inf"))
    above = tl.load(parents + at * p_node, mask=real, other=0)
    for _ in range(length):
        drafted = above > 0
        parent = tl.load(scores + (above - 1) * s_node, mask=drafted, other=float("inf"))
        score = tl.where(parent >= score, score, tl.where(parent == parent, parent, -float("inf")))
        above = tl.load(parents + (above - 1) * p_node, mask=drafted, other=0)
    return score


@triton.jit
def _pack(
    tokens, parents, depths, scores, last, out_tokens, out_parents, out_depths, valid, mask, place, out_scores,
    total, kept, length, t_row, t_node, p_row, p_node, d_row, d_node, s_row, s_node, l_row,
    M: tl.constexpr, N: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """`kept` of `total` nodes. M: at least total; N: at least kept + 1."""
    row = tl.program_id(0).to(tl.int64)
    parents, scores = parents + row * p_row, scores + row * s_row
    out, place, mask = row * (kept + 1), place + row * (total + 1), mask + row * (kept + 1) * (kept + 1)
    node = tl.arange(0, M)
    real = node < total
    score = _lowered(scores, parents, node, real, p_node, s_node, length)
    rank = tl.zeros([M], tl.int32)
    for start in range(0, total, TOGETHER):
        other = start + tl.arange(0, TOGETHER)
        against = _lowered(scores, parents, other, other < total, p_node, s_node, length)
        equal = (against[None, :] == score[:, None]) & (other[None, :] < node[:, None])
        before = ((against[None, :] > score[:, None]) | equal) & (other < total)[None, :]
        rank += tl.sum(before.to(tl.int32), 1)
    keeps = real & (rank < kept)
    full = keeps & (score > -float("inf"))
    count = tl.sum(full.to(tl.int32), 0)  # empty nodes come last
    empty = keeps & (score == -float("inf"))
    into = tl.where(full, tl.cumsum(full.to(tl.int32), 0), count + tl.cumsum(empty.to(tl.int32), 0))
    into = tl.where(keeps, into, 0)

    tl.store(place, 0)
    tl.store(place + 1 + node, into.to(tl.int64), mask=real)
    one = tl.arange(0, N)
    for i in range(0, kept + 1):
        tl.store(mask + i * (kept + 1) + one, (one == i) | (one == 0), mask=one <= kept)
    tl.store(out_tokens + out, tl.load(last + row * l_row))
    tl.store(out_parents + out, 0)
    tl.store(out_depths + out, 0)
    tl.store(valid + out, True)
    tl.store(out_scores + out, float("inf"))
    tl.debug_barrier()  # the places and the empty mask are written before they are read and filled

    above = tl.load(parents + node * p_node, mask=keeps, other=0)
    up = tl.load(place + above, mask=keeps, other=0)
    tl.store(out_tokens + out + into, tl.load(tokens + row * t_row + node * t_node, mask=keeps), mask=keeps)
    tl.store(out_parents + out + into, up, mask=keeps)
    tl.store(out_depths + out + into, tl.load(depths + row * d_row + node * d_node, mask=keeps), mask=keeps)
    tl.store(valid + out + into, full, mask=keeps)
    tl.store(out_scores + out + into, score, mask=keeps)
    for _ in range(length):
        inner = keeps & (up > 0)  # only an empty node has a parent that was dropped: its parent is then the root
        tl.store(mask + into * (kept + 1) + up, True, mask=inner)
        above = tl.load(parents + (above - 1) * p_node, mask=inner, other=0)
        up = tl.load(place + above, mask=inner, other=0)


def pack(
    tokens: Tensor, parents: Tensor, depths: Tensor, scores: Tensor, last: Tensor, budget: int, length: int
) -> Packed:
    """See naive.py; fp32 scores."""
    batch, total = tokens.shape
    kept = min(budget, total)
    out = [indices(batch, kept + 1, device=tokens.device) for _ in range(3)]
    valid = torch.empty(batch, kept + 1, dtype=torch.bool, device=tokens.device)
    mask = torch.empty(batch, kept + 1, kept + 1, dtype=torch.bool, device=tokens.device)
    place = indices(batch, total + 1, device=tokens.device)
    lowered = torch.empty(batch, kept + 1, dtype=scores.dtype, device=tokens.device)
    room = triton.next_power_of_2(total)
    submit(
        _pack, (batch,),
        tokens, parents, depths, scores, last, *out, valid, mask, place, lowered, total, kept, length,
        *tokens.stride(), *parents.stride(), *depths.stride(), *scores.stride(), last.stride(0),
        M=room, N=triton.next_power_of_2(kept + 1), TOGETHER=max(1, min(32, PAIRS // room)), num_warps=4,
    )  # fmt: skip
    return out[0], out[1], out[2], valid, mask, place, lowered
