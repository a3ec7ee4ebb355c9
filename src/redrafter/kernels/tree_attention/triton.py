"""Tree attention. A node gets the bits that it gets in plain decoding of its path.

A query at position p sums over its keys in the order of their positions, in parts that depend on p alone:

- keys up to p - NEWEST: in blocks at fixed positions. These keys are in the slots of their positions, in a tree as in
  plain decoding. A tensor core adds 16 products in an order of its own, but a weight of exactly zero changes no sum.
- the NEWEST keys up to p, which a tree scatters over its slots: gathered for each query, and added in the same order.

Long texts are split into parts at fixed positions, which different programs compute. One kernel takes the newest keys,
a second one the older keys at the same time, a third one merges the parts in their order. The bits depend neither on
the number of queries of a program nor on the tensor core instruction, because all sums over older keys are a tensor
core's, and every multiplication before an addition is exact or an explicit `fma`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from redrafter.kernels.launch import gdc_launch_dependents, gdc_wait, launch, wait_for_previous
from redrafter.kernels.tree_attention.naive import NEWEST, newest_of


@triton.jit
def _start(part):
    """The first position of a part: parts of 128 positions, from 512 on of 512, 4,096 of 1,024, 16,384 of 4,096."""
    far = tl.where(part < 23, (part - 7) * 1024, (part - 19) * 4096)
    return tl.where(part < 4, part * 128, tl.where(part < 11, (part - 3) * 512, far))


@triton.jit
def _parts(length):
    """How many parts begin before this position."""
    far = tl.where(length <= 16384, 7 + tl.cdiv(length, 1024), 19 + tl.cdiv(length, 4096))
    return tl.where(length <= 512, tl.cdiv(length, 128), tl.where(length <= 4096, 3 + tl.cdiv(length, 512), far))


def parts_of(length: int) -> int:
    """`_parts` on the host.

    >>> [parts_of(n) for n in (1, 128, 129, 512, 513, 4096, 4097, 16384, 16385, 131072)]
    [1, 1, 2, 4, 5, 11, 12, 23, 24, 51]
    """
    for limit, before, size in ((512, 0, 128), (4096, 3, 512), (16384, 7, 1024)):
        if length <= limit:
            return before - -length // size
    return 19 - -length // 4096


@triton.jit
def _add(peak, total, acc, new_peak, new_total, new_acc):
    """Add one running softmax to another: the largest score, the sum of weights, the weighted sum of values."""
    higher = tl.maximum(peak, new_peak)
    base = tl.where(higher == -float("inf"), 0.0, higher)
    fade, weight = tl.exp2(peak - base), tl.exp2(new_peak - base)
    total = tl.fma(total, fade, new_total * weight)
    acc = tl.fma(acc, tl.broadcast_to(fade[:, None], acc.shape), new_acc * weight[:, None])
    return higher, total, acc


@triton.jit
def _older(
    q, keys, values, border, first, lowest, highest, part, scale, c_slot, size,
    M: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One part of the keys before the queries' borders."""
    d = tl.arange(0, D)
    ones = tl.full([BLOCK, 16], 1.0, q.dtype)
    peak = tl.full([M], -float("inf"), tl.float32)
    totals = tl.zeros([M, 16], tl.float32)  # the weights' sum, in 16 equal columns
    acc = tl.zeros([M, D], tl.float32)
    for start in range(tl.maximum(_start(part), lowest), tl.minimum(_start(part + 1), highest), BLOCK):
        slot = start + tl.arange(0, BLOCK)
        here = (slot < highest)[:, None] & (d < size)[None, :]
        k = tl.load(keys + slot[:, None] * c_slot + d[None, :], mask=here, other=0.0)
        v = tl.load(values + slot[:, None] * c_slot + d[None, :], mask=here, other=0.0)
        seen = (slot[None, :] < border[:, None]) & (slot[None, :] >= first[:, None])
        score = tl.where(seen, tl.dot(q, tl.trans(k), input_precision=PRECISION), -float("inf"))
        higher = tl.maximum(peak, tl.max(score, 1) * scale)
        base = tl.where(higher == -float("inf"), 0.0, higher)
        weight = tl.exp2(tl.fma(score, tl.full([M, BLOCK], scale, tl.float32), -base[:, None])).to(v.dtype)
        fade = tl.exp2(peak - base)
        totals = tl.dot(weight, ones, totals * fade[:, None], input_precision=PRECISION)
        acc = tl.dot(weight, v, acc * fade[:, None], input_precision=PRECISION)
        peak = higher
    return peak, tl.max(totals, 1), acc


@triton.jit
def _store(peaks, totals, sums, at, peak, total, acc, d, size, real):
    """Leave a running softmax for `_merge_parts`."""
    tl.store(peaks + at, peak, mask=real)
    tl.store(totals + at, total, mask=real)
    tl.store(sums + at[:, None] * size + d[None, :], acc, mask=real[:, None] & (d < size)[None, :])


@triton.jit
def _stored(peaks, totals, sums, at, d, size, there):
    """What `_store` left, or a softmax over nothing."""
    peak = tl.load(peaks + at, mask=there, other=-float("inf"))
    total = tl.load(totals + at, mask=there, other=0.0)
    mask = there[:, None] & (d < size)[None, :]
    return peak, total, tl.load(sums + at[:, None] * size + d[None, :], mask=mask, other=0.0)


@triton.jit(do_not_specialize=["n", "stored"])
def _newest_keys(
    query, keys, values, packed, sums, peaks, totals,
    q_row, q_node, c_row, c_head, c_slot, m_row, m_node, n, groups, size, kv_heads, scale, stored,
    NEWEST: tl.constexpr, TREE: tl.constexpr, M: tl.constexpr, D: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The newest keys of M queries, gathered for each. A tree's keys are in the mask's slots, a chain's at their
    positions."""
    tile, which = tl.program_id(0), tl.program_id(1)
    row, head = (which // kv_heads).to(tl.int64), (which % kv_heads).to(tl.int64)
    about = packed + row * m_row
    length, place = tl.load(about).to(tl.int32), tl.load(about + 3)
    window = tl.minimum(tl.load(about + 2), 1 << 30).to(tl.int32)
    each = groups * n
    query_at = tile * M + tl.arange(0, M)  # group by group, node by node
    real = query_at < each
    group, node = query_at // n, query_at % n
    position = length + tl.load(about + node * m_node + 1, mask=real, other=0).to(tl.int32)
    first = tl.maximum(position + 1 - tl.minimum(window, NEWEST), 0)
    i = tl.arange(0, NEWEST)[None, :]
    slot = position[:, None] + 1 - NEWEST + i
    seen = real[:, None] & (slot >= first[:, None])
    if TREE:
        slot = tl.load(about + (node * m_node)[:, None] + 4 + i, mask=seen, other=-1).to(tl.int32)
        seen = seen & (slot >= 0)
    d = tl.arange(0, D)[None, None, :]
    here = seen[:, :, None] & (d < size)
    keys += place * c_row + head * c_head
    values += place * c_row + head * c_head
    query += row * q_row + head * groups * size
    at = slot[:, :, None] * c_slot + d
    wait_for_previous(EARLY)  # only now: the mask is older than the kernel before this one
    k, v = tl.load(keys + at, mask=here, other=0.0), tl.load(values + at, mask=here, other=0.0)
    q = tl.load(
        query + (node * q_node + group * size)[:, None, None] + d, mask=real[:, None, None] & (d < size), other=0.0
    )
    score = tl.where(seen, tl.sum(q.to(tl.float32) * k.to(tl.float32), 2) * scale, -float("inf"))
    peak = tl.max(score, 1)
    base = tl.where(peak == -float("inf"), 0.0, peak)
    weight = tl.exp2(score - base[:, None]).to(v.dtype).to(tl.float32)
    acc = tl.sum(weight[:, :, None] * v.to(tl.float32), 1)
    into = (which.to(tl.int64) * (stored + 1) + stored) * each + query_at
    _store(peaks, totals, sums, into, peak, tl.sum(weight, 1), acc, tl.arange(0, D), size, real)


@triton.jit(do_not_specialize=["n", "stored"])
def _older_keys(
    query, keys, values, packed, sums, peaks, totals, out,
    q_row, q_node, c_row, c_head, c_slot, m_row, m_node, o_row, o_node, n, groups, size, kv_heads, scale, stored,
    NEWEST: tl.constexpr, SINGLE: tl.constexpr, PREFIX: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr,
    D: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Older keys of M queries that share a key head: parts by the programs of the last axis, the first PREFIX parts as
    one. If SINGLE, one program computes all parts, adds the newest keys and writes the result.

    What this kernel reads was complete when `_newest_keys`, the kernel before it, let it start: the queries, and keys
    that are older than theirs. So this kernel waits for `_newest_keys` only at the end.
    """
    if EARLY:
        gdc_launch_dependents()
    tile, which, worker = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, head = (which // kv_heads).to(tl.int64), (which % kv_heads).to(tl.int64)
    about = packed + row * m_row
    length, place = tl.load(about).to(tl.int32), tl.load(about + 3)
    window = tl.minimum(tl.load(about + 2), 1 << 30).to(tl.int32)
    keys += place * c_row + head * c_head
    values += place * c_row + head * c_head
    each = groups * n
    into = which.to(tl.int64) * (stored + 1)
    at = tile * M + tl.arange(0, M)
    real = at < each
    group, node = at // n, at % n
    position = length + tl.load(about + node * m_node + 1, mask=real, other=0).to(tl.int32)
    border = tl.where(real, tl.maximum(position + 1 - NEWEST, 0), 0)
    highest = tl.max(border, 0)
    count = _parts(highest)
    units = tl.maximum(count - PREFIX, 0) + tl.minimum(count, 1)
    if SINGLE:
        units = 1
    d = tl.arange(0, D)
    in_size = (d < size)[None, :]
    of_head = head * groups * size
    q_at = (node * q_node + group * size)[:, None] + d[None, :]
    q = tl.load(query + row * q_row + of_head + q_at, mask=real[:, None] & in_size, other=0.0)
    first = tl.maximum(position - window + 1, 0)
    lowest = tl.min(tl.where(real, first, 1 << 30), 0) // BLOCK * BLOCK
    peak = tl.full([M], -float("inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    for turn in range(worker, units, tl.num_programs(2)):
        unit = units - 1 - turn  # the longest first
        peak = tl.full([M], -float("inf"), tl.float32)
        total = tl.zeros([M], tl.float32)
        acc = tl.zeros([M, D], tl.float32)
        begin = tl.where(unit == 0, 0, unit + PREFIX - 1)
        end = count if SINGLE else tl.minimum(unit + PREFIX, count)
        for part in range(begin, end):
            new_peak, new_total, new_acc = _older(
                q, keys, values, border, first, lowest, highest, part, scale, c_slot, size, M, BLOCK, D, PRECISION
            )
            peak, total, acc = _add(peak, total, acc, new_peak, new_total, new_acc)
        if not SINGLE:
            _store(peaks, totals, sums, (into + unit) * each + at, peak, total, acc, d, size, real)
    if EARLY:
        gdc_wait()  # a kernel that waits for this one thereby waits for `_newest_keys` too
    if SINGLE:
        new_peak, new_total, new_acc = _stored(peaks, totals, sums, (into + stored) * each + at, d, size, real)
        peak, total, acc = _add(peak, total, acc, new_peak, new_total, new_acc)
        result = (acc / tl.where(real, total, 1.0)[:, None]).to(out.dtype.element_ty)
        o_at = (node * o_node + group * size)[:, None] + d[None, :]
        tl.store(out + row * o_row + of_head + o_at, result, mask=real[:, None] & in_size)


@triton.jit(do_not_specialize=["n", "stored"])
def _merge_parts(
    packed, sums, peaks, totals, out, m_row, m_node, o_row, o_node, n, groups, size, kv_heads, stored,
    NEWEST: tl.constexpr, PREFIX: tl.constexpr, M: tl.constexpr, D: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Add the parts of M queries in their order, and the newest keys last."""
    tile, which = tl.program_id(0), tl.program_id(1)
    row, head = (which // kv_heads).to(tl.int64), (which % kv_heads).to(tl.int64)
    about = packed + row * m_row
    each = groups * n
    at = tile * M + tl.arange(0, M)
    real = at < each
    group, node = at // n, at % n
    position = tl.load(about) + tl.load(about + node * m_node + 1, mask=real, other=0)
    count = _parts(tl.max(tl.where(real, tl.maximum(position + 1 - NEWEST, 0), 0), 0).to(tl.int32))
    units = tl.maximum(count - PREFIX, 0) + tl.minimum(count, 1)
    into = which.to(tl.int64) * (stored + 1)
    d = tl.arange(0, D)
    wait_for_previous(EARLY)
    last_peak, last_total, last_acc = _stored(peaks, totals, sums, (into + stored) * each + at, d, size, real)
    peak = tl.full([M], -float("inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    for i in range(0, units, 4):  # a compiler does not move loads before sums
        here = (into + i) * each + at
        left = at * 0 + units - i
        peak_0, total_0, acc_0 = _stored(peaks, totals, sums, here, d, size, real)
        peak_1, total_1, acc_1 = _stored(peaks, totals, sums, here + each, d, size, real & (left > 1))
        peak_2, total_2, acc_2 = _stored(peaks, totals, sums, here + 2 * each, d, size, real & (left > 2))
        peak_3, total_3, acc_3 = _stored(peaks, totals, sums, here + 3 * each, d, size, real & (left > 3))
        peak, total, acc = _add(peak, total, acc, peak_0, total_0, acc_0)
        peak, total, acc = _add(peak, total, acc, peak_1, total_1, acc_1)
        peak, total, acc = _add(peak, total, acc, peak_2, total_2, acc_2)
        peak, total, acc = _add(peak, total, acc, peak_3, total_3, acc_3)
    peak, total, acc = _add(peak, total, acc, last_peak, last_total, last_acc)
    result = (acc / tl.where(real, total, 1.0)[:, None]).to(out.dtype.element_ty)
    out += row * o_row + head * groups * size
    o_at = (node * o_node + group * size)[:, None] + d[None, :]
    tl.store(out + o_at, result, mask=real[:, None] & (d < size)[None, :])


PROGRAMS = 396
"""Enough programs to fill a GPU; if rows and heads make fewer, the keys are split among programs."""
MOST = 128 << 20
"""Bytes of partial sums at most; one program per tile needs none."""
GATHERED = 128
"""Newest keys that a program gathers: those of 8 queries, unless a tree is deep."""
MERGED = 8
"""Queries whose parts a program merges."""
LONG = 2048
"""Slots of a cache above which reading keys costs more than merging parts."""


def plan(programs: int, queries: int, slots: int, dtype: torch.dtype, d: int) -> dict[str, Any]:
    """Launch parameters of `_older_keys` for `programs` = rows · key heads, each with this many queries and slots.

    The fastest of some dozens on an H200. Only BLOCK has an influence on the bits, so it depends on the model alone.
    """
    full, short = dtype == torch.float32, slots <= LONG
    m = 16 if queries <= 16 else 64
    prefix = 1 if short else 4
    workers = PROGRAMS // (programs * triton.cdiv(queries, m))
    return {
        "workers": 0 if workers < 2 else min(workers, parts_of(slots) + 1 - prefix),
        "PREFIX": prefix,
        "M": m,
        "BLOCK": 32 if full or d > 128 else 64,
        "PRECISION": "ieee" if full else "tf32",
        "num_warps": 4,
        "num_stages": 2 if full or d > 128 or m > 16 else 3,
    }


def attend(query: Tensor, keys: Tensor, values: Tensor, packed: Tensor, scaling: float) -> Tensor:
    """See naive.py. The last axis of every tensor is contiguous; keys and values have equal strides.

    The kernels read `packed` before they wait for the kernel before them, so that kernel must not be the one that
    writes `packed`.
    """
    batch, n, heads, size = query.shape
    kv_heads = keys.shape[1]
    groups = heads // kv_heads
    programs, each = batch * kv_heads, groups * n
    d = max(16, triton.next_power_of_2(size))
    older = plan(programs, each, keys.shape[2], query.dtype, d)
    workers = older.pop("workers")
    if 4 * batch * heads * n * size * (parts_of(keys.shape[2]) + 1) > MOST:
        workers = 0
    stored = parts_of(keys.shape[2]) if workers else 0
    sums = torch.empty(programs, stored + 1, each, size, dtype=torch.float32, device=query.device)
    peaks, totals = torch.empty(2, *sums.shape[:3], dtype=torch.float32, device=query.device)
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    scale = scaling * 1.44269504  # the hardware has exp2, not exp
    tree, newest = newest_of(packed) > 0, newest_of(packed) or NEWEST
    read = (query, keys, values, packed, sums, peaks, totals)
    strides = (*query.stride()[:2], *keys.stride()[:3], packed.stride(0), packed.stride(2))
    sizes = (n, groups, size, kv_heads)
    few = GATHERED // newest
    launch(
        _newest_keys, (triton.cdiv(each, few), programs), query.device, *read, *strides, *sizes, scale, stored,
        NEWEST=newest, TREE=tree, M=few, D=d, num_warps=4,
    )  # fmt: skip
    launch(
        _older_keys, (triton.cdiv(each, older["M"]), programs, max(1, workers)), query.device,
        *read, out, *strides, *out.stride()[:2], *sizes, scale, stored,
        NEWEST=newest, SINGLE=workers == 0, D=d, **older,
    )  # fmt: skip
    if workers:
        launch(
            _merge_parts, (triton.cdiv(each, MERGED), programs), query.device,
            packed, sums, peaks, totals, out, packed.stride(0), packed.stride(2), *out.stride()[:2], *sizes, stored,
            NEWEST=newest, PREFIX=older["PREFIX"], M=MERGED, D=d, num_warps=4,
        )  # fmt: skip
    return out
