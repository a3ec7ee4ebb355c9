"""The same in two kernels: every key is read once, the mask is a few words a node."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _absorb(q, k, v, seen, scale, peak, total, acc, PRECISION: tl.constexpr):
    """The softmax so far, with some more keys in it."""
    score = tl.where(seen, tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale, -float("inf"))
    higher = tl.maximum(peak, tl.max(score, 1))
    base = tl.where(higher == -float("inf"), 0.0, higher)
    weight = tl.exp2(score - base[:, None])
    fade = tl.exp2(peak - base)
    total = total * fade + tl.sum(weight, 1)
    acc = acc * fade[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=PRECISION)
    return higher, total, acc


@triton.jit
def _part(
    query, key, value, keys, values, packed, sums, peaks,
    q_row, q_head, q_node, k_row, k_head, k_node, v_row, v_head, v_node, c_row, c_head, c_slot, m_row, m_node,
    n, groups, size, kv_heads, scaling,
    SPLITS: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One stretch of the cache, or the tree itself (the last), under M queries that share a key head."""
    split, tile, which = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, head = (which // kv_heads).to(tl.int64), (which % kv_heads).to(tl.int64)
    at = tile * M + tl.arange(0, M)  # group by group, node by node
    real = at < groups * n
    group, node = at // n, at % n
    d = tl.arange(0, D)
    in_size = d[None, :] < size
    q = tl.load(
        query + row * q_row + (head * groups + group)[:, None] * q_head + node[:, None] * q_node + d[None, :],
        mask=real[:, None] & in_size, other=0.0,
    )  # fmt: skip
    about = packed + row * m_row + node * m_node
    length = tl.load(packed + row * m_row).to(tl.int32)
    depth = tl.load(about + 1, mask=real, other=0)
    window = tl.load(packed + row * m_row + 2)
    peak = tl.full([M], -float("inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    scale = scaling * 1.44269504  # exp2 is what the hardware has

    if split < SPLITS:
        stretch = tl.cdiv(tl.cdiv(length, BLOCK), SPLITS) * BLOCK
        base_k = keys + row * c_row + head * c_head
        base_v = values + row * c_row + head * c_head
        stop = tl.minimum((split + 1) * stretch, length)
        for start in range(split * stretch, stop, BLOCK):
            slot = start + tl.arange(0, BLOCK)
            inside = slot < stop
            k = tl.load(base_k + slot[:, None] * c_slot + d[None, :], mask=inside[:, None] & in_size, other=0.0)
            v = tl.load(base_v + slot[:, None] * c_slot + d[None, :], mask=inside[:, None] & in_size, other=0.0)
            seen = inside[None, :] & ((length + depth)[:, None] - slot[None, :] < window)
            peak, total, acc = _absorb(q, k, v, seen, scale, peak, total, acc, PRECISION)
    else:
        for start in range(0, n, BLOCK):
            j = start + tl.arange(0, BLOCK)
            inside = j < n
            here = inside[:, None] & in_size
            k = tl.load(key + row * k_row + head * k_head + j[:, None] * k_node + d[None, :], mask=here, other=0.0)
            v = tl.load(value + row * v_row + head * v_head + j[:, None] * v_node + d[None, :], mask=here, other=0.0)
            if tile == 0:
                into = row * c_row + head * c_head + (length + j)[:, None] * c_slot + d[None, :]
                tl.store(keys + into, k, mask=here)
                tl.store(values + into, v, mask=here)
            key_depth = tl.load(packed + row * m_row + j * m_node + 1, mask=inside, other=0)
            bits = tl.load(about + 3 + start // 64, mask=real, other=0)
            seen = ((bits[:, None] >> (j % 64).to(tl.int64)[None, :]) & 1) == 1
            seen = seen & inside[None, :] & (depth[:, None] - key_depth[None, :] < window)
            peak, total, acc = _absorb(q, k, v, seen, scale, peak, total, acc, PRECISION)

    place = (which * (SPLITS + 1) + split).to(tl.int64) * groups * n + at
    tl.store(peaks + place, tl.where(total > 0, peak + tl.log2(total), -float("inf")), mask=real)
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(sums + place[:, None] * size + d[None, :], acc, mask=real[:, None] & in_size)


@triton.jit
def _merge(
    sums, peaks, out, n, groups, size, kv_heads, o_row, o_node,
    PARTS: tl.constexpr, P: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """One query: the parts weighed by how much of its softmax each has seen."""
    at, which = tl.program_id(0), tl.program_id(1)
    row, head = (which // kv_heads).to(tl.int64), which % kv_heads
    group, node = at // n, at % n
    part, d = tl.arange(0, P), tl.arange(0, D)
    place = (which * PARTS + part).to(tl.int64) * groups * n + at
    peak = tl.load(peaks + place, mask=part < PARTS, other=-float("inf"))
    weight = tl.exp2(peak - tl.max(peak, 0))
    weight = weight / tl.sum(weight, 0)
    here = (part < PARTS)[:, None] & (d[None, :] < size)
    acc = tl.load(sums + place[:, None] * size + d[None, :], mask=here, other=0.0)
    found = tl.sum(acc * weight[:, None], 0)
    into = out + row * o_row + node * o_node + (head * groups + group) * size + d
    tl.store(into, found.to(out.dtype.element_ty), mask=d < size)


def attend(
    query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, packed: Tensor, scaling: float
) -> Tensor:
    """See naive.py; the last axis of every tensor must be contiguous, the two caches laid out alike."""
    batch, heads, n, size = query.shape
    kv_heads = keys.shape[1]
    groups = heads // kv_heads
    m = min(max(16, triton.next_power_of_2(groups * n)), 64)
    tiles = triton.cdiv(groups * n, m)
    # Enough programs to fill the machine, few enough that their parts stay cheap to merge.
    splits = max(1, min(16, (132 if n > 16 else 264) // (batch * kv_heads * tiles)))
    sums = torch.empty(batch, kv_heads, splits + 1, groups * n, size, dtype=torch.float32, device=query.device)
    peaks = torch.empty(batch, kv_heads, splits + 1, groups * n, dtype=torch.float32, device=query.device)
    out = torch.empty(batch, n, heads, size, dtype=query.dtype, device=query.device)
    d = max(16, triton.next_power_of_2(size))
    full = query.dtype == torch.float32
    options: dict[str, Any] = {"num_warps": 4, "num_stages": 2}
    _part[splits + 1, tiles, batch * kv_heads](
        query, key, value, keys, values, packed, sums, peaks,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *keys.stride()[:3],
        packed.stride(0), packed.stride(2),
        n, groups, size, kv_heads, scaling,
        SPLITS=splits, M=m, BLOCK=32 if full or d > 128 else 64, D=d, PRECISION="ieee" if full else "tf32", **options,
    )  # fmt: skip
    _merge[groups * n, batch * kv_heads](
        sums, peaks, out, n, groups, size, kv_heads, out.stride(0), out.stride(1),
        PARTS=splits + 1, P=triton.next_power_of_2(splits + 1), D=d, num_warps=1 if d <= 128 else 2,
    )  # fmt: skip
    return out
