"""Tree attention in one kernel: every key is read once per tile of queries, and the mask is a few words per node.

Queries and new keys may come unrotated; the kernel then rotates them.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from redrafter.kernels.tree_attention.naive import Rotary


@triton.jit
def _absorb(q, k, v, seen, scale, peak, total, acc, PRECISION: tl.constexpr):
    """Add a block of keys to a running softmax."""
    score = tl.where(seen, tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale, -float("inf"))
    higher = tl.maximum(peak, tl.max(score, 1))
    base = tl.where(higher == -float("inf"), 0.0, higher)
    weight = tl.exp2(score - base[:, None])
    fade = tl.exp2(peak - base)
    total = total * fade + tl.sum(weight, 1)
    acc = acc * fade[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=PRECISION)
    return higher, total, acc


@triton.jit
def _turned(x, at, cos, sin, angle, d, size, here, scales, offset, eps, NORMED: tl.constexpr):
    """Load the heads at x + at + d, norm them if NORMED, and rotate the first half of a head against the second."""
    half = size // 2
    across = tl.where(d < half, d + half, d - half)
    sign = tl.where(d < half, -1.0, 1.0)
    raw = tl.load(x + at[:, None] + d[None, :], mask=here, other=0.0)
    own = raw.to(tl.float32)
    other = tl.load(x + at[:, None] + across[None, :], mask=here, other=0.0).to(tl.float32) * sign[None, :]
    if NORMED:
        unit = tl.rsqrt(tl.sum(own * own, 1) / size + eps)[:, None]
        own *= unit * (tl.load(scales + d, mask=d < size, other=0.0).to(tl.float32) + offset)[None, :]
        other *= unit * (tl.load(scales + across, mask=d < size, other=0.0).to(tl.float32) + offset)[None, :]
    c = tl.load(cos + angle[:, None] + d[None, :], mask=here, other=0.0).to(tl.float32)
    s = tl.load(sin + angle[:, None] + d[None, :], mask=here, other=0.0).to(tl.float32)
    return (own * c + other * s).to(raw.dtype)


@triton.jit
def _tree_attention(
    query, key, value, keys, values, packed, cos, sin, q_scales, k_scales, sums, peaks, arrivals, out,
    q_row, q_head, q_node, k_row, k_head, k_node, v_row, v_head, v_node, c_row, c_head, c_slot, m_row, m_node,
    a_row, a_node, o_row, o_node, n, groups, size, kv_heads, scaling, offset, eps,
    TURNS: tl.constexpr, NORMED: tl.constexpr,
    SPLITS: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One split of the keys (the cache's, then the tree's own) for M queries that share a key head."""
    split, tile, which = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, head = (which // kv_heads).to(tl.int64), (which % kv_heads).to(tl.int64)
    at = tile * M + tl.arange(0, M)  # group by group, node by node
    real = at < groups * n
    group, node = at // n, at % n
    d = tl.arange(0, D)
    in_size = d[None, :] < size
    at_q = row * q_row + (head * groups + group) * q_head + node * q_node
    if TURNS:
        q_here = real[:, None] & in_size
        q = _turned(query, at_q, cos, sin, row * a_row + node * a_node, d, size, q_here, q_scales, offset, eps, NORMED)
    else:
        q = tl.load(query + at_q[:, None] + d[None, :], mask=real[:, None] & in_size, other=0.0)
    about = packed + row * m_row + node * m_node
    length, place = tl.load(packed + row * m_row).to(tl.int32), tl.load(packed + row * m_row + 3)
    depth = tl.load(about + 1, mask=real, other=0)
    window = tl.load(packed + row * m_row + 2)
    peak = tl.full([M], -float("inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    scale = scaling * 1.44269504  # the hardware has exp2, not exp
    blocks = tl.cdiv(length, BLOCK)
    share = tl.cdiv(blocks + tl.cdiv(n, BLOCK), SPLITS)

    base_k = keys + place * c_row + head * c_head
    base_v = values + place * c_row + head * c_head
    for start in range(split * share * BLOCK, tl.minimum((split + 1) * share, blocks) * BLOCK, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        inside = slot < length
        k = tl.load(base_k + slot[:, None] * c_slot + d[None, :], mask=inside[:, None] & in_size, other=0.0)
        v = tl.load(base_v + slot[:, None] * c_slot + d[None, :], mask=inside[:, None] & in_size, other=0.0)
        seen = inside[None, :] & ((length + depth)[:, None] - slot[None, :] < window)
        peak, total, acc = _absorb(q, k, v, seen, scale, peak, total, acc, PRECISION)

    stop = tl.minimum(((split + 1) * share - blocks) * BLOCK, n)
    for start in tl.range(tl.maximum(split * share - blocks, 0) * BLOCK, stop, BLOCK, num_stages=1):
        j = start + tl.arange(0, BLOCK)
        inside = j < n
        here = inside[:, None] & in_size
        at_k = row * k_row + head * k_head + j * k_node
        if TURNS:
            angle = row * a_row + j * a_node
            k = _turned(key, at_k, cos, sin, angle, d, size, here, k_scales, offset, eps, NORMED)
        else:
            k = tl.load(key + at_k[:, None] + d[None, :], mask=here, other=0.0)
        v = tl.load(value + row * v_row + head * v_head + j[:, None] * v_node + d[None, :], mask=here, other=0.0)
        if tile == 0:
            into = place * c_row + head * c_head + (length + j)[:, None] * c_slot + d[None, :]
            tl.store(keys + into, k, mask=here)
            tl.store(values + into, v, mask=here)
        key_depth = tl.load(packed + row * m_row + j * m_node + 1, mask=inside, other=0)
        bits = tl.load(about + 4 + start // 64, mask=real, other=0)
        seen = ((bits[:, None] >> (j % 64).to(tl.int64)[None, :]) & 1) == 1
        seen = seen & inside[None, :] & (depth[:, None] - key_depth[None, :] < window)
        peak, total, acc = _absorb(q, k, v, seen, scale, peak, total, acc, PRECISION)

    into = out + row * o_row + (node * o_node + (head * groups + group) * size)[:, None] + d[None, :]
    if SPLITS == 1:
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(into, acc.to(out.dtype.element_ty), mask=real[:, None] & in_size)
    else:
        part_at = (which * SPLITS + split).to(tl.int64) * groups * n + at
        tl.store(peaks + part_at, tl.where(total > 0, peak + tl.log2(total), -float("inf")), mask=real)
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(sums + part_at[:, None] * size + d[None, :], acc, mask=real[:, None] & in_size)
        tl.debug_barrier()  # all stores of this program come before its arrival is counted
        counter = arrivals + which * tl.num_programs(1) + tile
        if tl.atomic_add(counter, 1) == SPLITS - 1:  # the last program merges the splits, and resets the counter
            tl.store(counter, 0)
            peak = tl.full([M], -float("inf"), tl.float32)
            total = tl.zeros([M], tl.float32)
            acc = tl.zeros([M, D], tl.float32)
            for part in range(SPLITS):
                found_at = (which * SPLITS + part).to(tl.int64) * groups * n + at
                new = tl.load(peaks + found_at, mask=real, other=0.0, cache_modifier=".cg")
                found = sums + found_at[:, None] * size + d[None, :]
                found = tl.load(found, mask=real[:, None] & in_size, other=0.0, cache_modifier=".cg")
                higher = tl.maximum(peak, new)
                base = tl.where(higher == -float("inf"), 0.0, higher)
                weight, fade = tl.exp2(new - base), tl.exp2(peak - base)
                total = total * fade + weight
                acc = acc * fade[:, None] + found * weight[:, None]
                peak = higher
            acc = acc / total[:, None]
            tl.store(into, acc.to(out.dtype.element_ty), mask=real[:, None] & in_size)


PROGRAMS = 264
"""Enough programs to fill a GPU twice; if rows and heads make fewer, the keys are split among programs."""
LONG = 2048
"""Slots of a cache above which reading keys costs more than merging splits."""


def plan(programs: int, queries: int, slots: int, dtype: torch.dtype, d: int) -> dict[str, Any]:
    """Launch parameters for `programs` = rows · key heads, each with this many queries and slots.

    The fastest of some dozens on an H200, for one token and 64 nodes, 512 and 4096 slots.
    """
    few, full, short = queries <= 32, dtype == torch.float32, slots <= LONG
    m = min(max(16, triton.next_power_of_2(queries)), 32 if short and queries <= 64 else 64)
    block = 32 if few or full or d > 128 else 64
    parts = PROGRAMS // (2 if short or not few else 1) // (programs * triton.cdiv(queries, m))
    return {
        "SPLITS": max(1, min(16, parts)),
        "M": m,
        "BLOCK": block,
        "PRECISION": "ieee" if full else "tf32",
        "num_warps": 8 if m == 32 and block == 64 else 4,
        "num_stages": 2 if full or d > 128 else 3,
    }


def attend(
    query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, packed: Tensor, arrivals: Tensor,
    scaling: float, turn: Rotary | None = None,
) -> Tensor:  # fmt: skip
    """See naive.py. The last axis of every tensor is contiguous; keys and values have equal strides, so do cos and sin.

    `arrivals` holds PROGRAMS zeros. They are zeros again afterwards; no other pass may use them meanwhile.
    """
    batch, heads, n, size = query.shape
    kv_heads = keys.shape[1]
    groups = heads // kv_heads
    d = max(16, triton.next_power_of_2(size))
    shared = plan(batch * kv_heads, groups * n, keys.shape[2], query.dtype, d)
    splits = shared["SPLITS"]
    parts = (batch, kv_heads, splits, groups * n) if splits > 1 else (1, 1, 1, 1)
    sums = torch.empty(*parts, size, dtype=torch.float32, device=query.device)
    peaks = torch.empty(parts, dtype=torch.float32, device=query.device)
    out = torch.empty(batch, n, heads, size, dtype=query.dtype, device=query.device)
    cos, sin = (turn.cos, turn.sin) if turn else (query, query)
    q_scales, k_scales, offset, eps = (turn and turn.norms) or (query, query, 0.0, 0.0)
    _tree_attention[splits, triton.cdiv(groups * n, shared["M"]), batch * kv_heads](
        query, key, value, keys, values, packed, cos, sin, q_scales, k_scales, sums, peaks, arrivals, out,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *keys.stride()[:3],
        packed.stride(0), packed.stride(2), *cos.stride()[:2], out.stride(0), out.stride(1),
        n, groups, size, kv_heads, scaling, offset, eps,
        TURNS=turn is not None, NORMED=turn is not None and turn.norms is not None, D=d, **shared,
    )  # fmt: skip
    return out
