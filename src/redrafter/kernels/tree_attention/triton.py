"""Tree attention in one kernel. A node gets the bits that it gets in plain decoding of its path.

A query at position p sums over its keys in the order of their positions, in parts that depend on p alone:

- keys before p - NEWEST: in blocks at fixed positions. These keys are in the slots of their positions, in a tree as in
  plain decoding. A tensor core adds 16 products in an order of its own, but a weight of exactly zero changes no sum.
- the NEWEST + 1 keys up to p, which a tree scatters over its slots: one after the other. Each tensor core instruction
  gets at most one weight above zero per query, so the order of the sum is ours.

Long texts are split into parts at fixed positions, which different programs compute. Parts are merged in their order.
The bits depend neither on the number of queries of a program nor on the tensor core instruction, because every sum over
keys is a tensor core's, and every multiplication before an addition is an explicit `fma`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from redrafter.kernels.launch import launch, wait_for_previous
from redrafter.kernels.tree_attention.naive import BITS, NEWEST


@triton.jit
def _start(part):
    """The first position of a part: parts of 128 positions, from 512 on of 512, 2,048 of 1,024, 16,384 of 4,096."""
    far = tl.where(part < 21, (part - 5) * 1024, (part - 17) * 4096)
    return tl.where(part < 4, part * 128, tl.where(part < 7, (part - 3) * 512, far))


@triton.jit
def _parts(length):
    """How many parts begin before this position."""
    far = tl.where(length <= 16384, 5 + tl.cdiv(length, 1024), 17 + tl.cdiv(length, 4096))
    return tl.where(length <= 512, tl.cdiv(length, 128), tl.where(length <= 2048, 3 + tl.cdiv(length, 512), far))


def parts_of(length: int) -> int:
    """`_parts` on the host.

    >>> [parts_of(n) for n in (1, 128, 129, 512, 513, 2048, 2049, 16384, 16385, 131072)]
    [1, 1, 2, 4, 5, 7, 8, 21, 22, 49]
    """
    for limit, before, size in ((512, 0, 128), (2048, 3, 512), (16384, 5, 1024)):
        if length <= limit:
            return before - -length // size
    return 17 - -length // 4096


@triton.jit
def _merge(peak, total, acc, new_peak, new_total, new_acc):
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
def _add_singly(weight, rank, first, last, v, totals, acc, PRECISION: tl.constexpr):
    """Add values (N, D) one after the other, in the order of their ranks. A query has one weight per rank at most."""
    ones = tl.full([v.shape[0], 16], 1.0, v.dtype)
    for i in range(first, last + 1):
        one = tl.where((rank == i)[None, :], weight, 0.0).to(v.dtype)
        totals = tl.dot(one, ones, totals, input_precision=PRECISION)
        acc = tl.dot(one, v, acc, input_precision=PRECISION)
    return totals, acc


@triton.jit
def _node_scores(
    q, keys, values, about, bits, length, real, first, block, c_slot, m_node, n, size,
    NODES: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of at most 64 tree nodes: the queries' scores with those on their path, values and depths."""
    d = tl.arange(0, D)
    node = block * 64 + tl.arange(0, NODES)
    here = (node < n)[:, None] & (d < size)[None, :]
    at = (length + node)[:, None] * c_slot + d[None, :]
    k, v = tl.load(keys + at, mask=here, other=0.0), tl.load(values + at, mask=here, other=0.0)
    depth = tl.load(about + node * m_node + 1, mask=node < n, other=0).to(tl.int32)
    word = tl.load(bits + block, mask=real, other=0)
    seen = ((word[:, None] >> (node % 64).to(tl.int64)[None, :]) & 1) == 1
    seen = seen & ((length + depth)[None, :] >= first[:, None]) & (node < n)[None, :]
    return tl.where(seen, tl.dot(q, tl.trans(k), input_precision=PRECISION), -float("inf")), v, depth


@triton.jit
def _newest_of_tree(
    q, keys, values, about, bits, length, real, first, scale, c_slot, m_node, n, size,
    NEWEST: tl.constexpr, BLOCKS: tl.constexpr, NODES: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The newest keys of tree nodes: the last ones of the text, then the nodes on the path, depth by depth."""
    d = tl.arange(0, D)
    lane = tl.arange(0, NEWEST)
    slot = length - NEWEST + lane
    here = (slot >= 0)[:, None] & (d < size)[None, :]
    k = tl.load(keys + slot[:, None] * c_slot + d[None, :], mask=here, other=0.0)
    v = tl.load(values + slot[:, None] * c_slot + d[None, :], mask=here, other=0.0)
    seen = real[:, None] & (slot[None, :] >= first[:, None])
    score = tl.where(seen, tl.dot(q, tl.trans(k), input_precision=PRECISION), -float("inf"))
    peak = tl.max(score, 1)
    for block in tl.static_range(BLOCKS):
        node_score, _, _ = _node_scores(
            q, keys, values, about, bits, length, real, first, block, c_slot, m_node, n, size, NODES, D, PRECISION
        )
        peak = tl.maximum(peak, tl.max(node_score, 1))
    peak = peak * scale
    base = tl.where(peak == -float("inf"), 0.0, peak)
    weight = tl.exp2(tl.fma(score, tl.full([M, NEWEST], scale, tl.float32), -base[:, None]))
    totals = tl.zeros([M, 16], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    totals, acc = _add_singly(weight, lane, tl.maximum(NEWEST - length, 0), NEWEST - 1, v, totals, acc, PRECISION)
    for block in tl.static_range(BLOCKS):  # nodes are in depth order, so the blocks are too
        node_score, node_v, depth = _node_scores(
            q, keys, values, about, bits, length, real, first, block, c_slot, m_node, n, size, NODES, D, PRECISION
        )
        weight = tl.exp2(tl.fma(node_score, tl.full([M, NODES], scale, tl.float32), -base[:, None]))
        totals, acc = _add_singly(weight, depth, 0, tl.max(depth, 0), node_v, totals, acc, PRECISION)
    return peak, tl.max(totals, 1), acc


@triton.jit
def _newest_of_chain(
    q, keys, values, position, real, first, scale, c_slot, size,
    M: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The newest keys of a chain's nodes, which are in the slots of their positions."""
    d = tl.arange(0, D)
    in_size = (d < size)[None, :]
    lane = tl.arange(0, 16)
    begin = tl.min(tl.where(real, first, 1 << 30), 0) // 16 * 16
    end = tl.max(tl.where(real, position, 0), 0) + 1
    peak = tl.full([M], -float("inf"), tl.float32)
    for start in range(begin, end, 16):
        slot = start + lane
        k = tl.load(keys + slot[:, None] * c_slot + d[None, :], mask=(slot < end)[:, None] & in_size, other=0.0)
        seen = real[:, None] & (slot[None, :] >= first[:, None]) & (slot[None, :] <= position[:, None])
        score = tl.where(seen, tl.dot(q, tl.trans(k), input_precision=PRECISION), -float("inf"))
        peak = tl.maximum(peak, tl.max(score, 1))
    peak = peak * scale
    base = tl.where(peak == -float("inf"), 0.0, peak)
    totals = tl.zeros([M, 16], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    for start in range(begin, end, 16):
        slot = start + lane
        here = (slot < end)[:, None] & in_size
        k = tl.load(keys + slot[:, None] * c_slot + d[None, :], mask=here, other=0.0)
        v = tl.load(values + slot[:, None] * c_slot + d[None, :], mask=here, other=0.0)
        seen = real[:, None] & (slot[None, :] >= first[:, None]) & (slot[None, :] <= position[:, None])
        score = tl.where(seen, tl.dot(q, tl.trans(k), input_precision=PRECISION), -float("inf"))
        weight = tl.exp2(tl.fma(score, tl.full([M, 16], scale, tl.float32), -base[:, None]))
        totals, acc = _add_singly(weight, lane, 0, tl.minimum(end - start, 16) - 1, v, totals, acc, PRECISION)
    return peak, tl.max(totals, 1), acc


@triton.jit
def _store(peaks, totals, sums, at, peak, total, acc, d, size, real):
    """Leave a running softmax for the merge."""
    tl.store(peaks + at, peak, mask=real)
    tl.store(totals + at, total, mask=real)
    tl.store(sums + at[:, None] * size + d[None, :], acc, mask=real[:, None] & (d < size)[None, :])


@triton.jit
def _found(peaks, totals, sums, at, d, size, there):
    """What `_store` left, or a softmax over nothing."""
    peak = tl.load(peaks + at, mask=there, other=-float("inf"), cache_modifier=".cg")
    total = tl.load(totals + at, mask=there, other=0.0, cache_modifier=".cg")
    mask = there[:, None] & (d < size)[None, :]
    return peak, total, tl.load(sums + at[:, None] * size + d[None, :], mask=mask, other=0.0, cache_modifier=".cg")


@triton.jit(do_not_specialize=["n", "workers", "stored"])
def _tree_attention(
    query, keys, values, packed, sums, peaks, totals, arrivals, out,
    q_row, q_node, c_row, c_head, c_slot, m_row, m_node, o_row, o_node, n, groups, size, kv_heads, scaling,
    workers, stored,
    NEWEST: tl.constexpr, BLOCKS: tl.constexpr, NODES: tl.constexpr, SINGLE: tl.constexpr, PREFIX: tl.constexpr,
    M: tl.constexpr, FEW: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """M queries that share a key head. If SINGLE, one program computes all. Else programs 0 .. workers - 1 compute
    parts of the older keys, the first PREFIX parts as one, and one more program the newest keys, FEW queries at a
    time; the last program to finish merges the parts."""
    wait_for_previous(EARLY)
    worker, tile, which = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, head = (which // kv_heads).to(tl.int64), (which % kv_heads).to(tl.int64)
    d = tl.arange(0, D)
    in_size = (d < size)[None, :]
    scale = scaling * 1.44269504  # the hardware has exp2, not exp
    about = packed + row * m_row
    length, place = tl.load(about).to(tl.int32), tl.load(about + 3)
    window = tl.minimum(tl.load(about + 2), 1 << 30).to(tl.int32)
    keys += place * c_row + head * c_head
    values += place * c_row + head * c_head
    query += row * q_row + head * groups * size
    each = groups * n
    into = which.to(tl.int64) * (stored + 1)

    at = tile * M + tl.arange(0, M)  # group by group, node by node
    real = at < each
    group, node = at // n, at % n
    position = length + tl.load(about + node * m_node + 1, mask=real, other=0).to(tl.int32)
    border = tl.where(real, tl.maximum(position - NEWEST, 0), 0)
    highest = tl.max(border, 0)
    count = _parts(highest)
    units = tl.maximum(count - PREFIX, 0) + tl.minimum(count, 1)
    if SINGLE:
        units = 1
    peak = tl.full([M], -float("inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)

    if worker < workers:
        q_at = (node * q_node + group * size)[:, None] + d[None, :]
        q = tl.load(query + q_at, mask=real[:, None] & in_size, other=0.0)
        first = tl.maximum(position - window + 1, 0)
        lowest = tl.min(tl.where(real, first, 1 << 30), 0) // BLOCK * BLOCK
        for unit in range(worker, units, workers):
            peak = tl.full([M], -float("inf"), tl.float32)
            total = tl.zeros([M], tl.float32)
            acc = tl.zeros([M, D], tl.float32)
            begin = tl.where(unit == 0, 0, unit + PREFIX - 1)
            end = tl.minimum(unit + PREFIX, count)
            if SINGLE:
                end = count
            for part in range(begin, end):
                new_peak, new_total, new_acc = _older(
                    q, keys, values, border, first, lowest, highest, part, scale, c_slot, size, M, BLOCK, D, PRECISION
                )
                peak, total, acc = _merge(peak, total, acc, new_peak, new_total, new_acc)
            if not SINGLE:
                _store(peaks, totals, sums, (into + unit) * each + at, peak, total, acc, d, size, real)
    if worker == workers or SINGLE:
        for start in range(tile * M, tl.minimum((tile + 1) * M, each), FEW):
            few = start + tl.arange(0, FEW)
            there = few < each
            its_group, its_node = few // n, few % n
            few_at = (its_node * q_node + its_group * size)[:, None] + d[None, :]
            few_q = tl.load(query + few_at, mask=there[:, None] & in_size, other=0.0)
            own = length + tl.load(about + its_node * m_node + 1, mask=there, other=0).to(tl.int32)
            near = tl.maximum(own - tl.minimum(window - 1, NEWEST), 0)
            if BLOCKS > 0:
                new_peak, new_total, new_acc = _newest_of_tree(
                    few_q, keys, values, about, about + its_node * m_node + 4, length, there, near, scale, c_slot,
                    m_node, n, size, NEWEST, BLOCKS, NODES, FEW, D, PRECISION,
                )  # fmt: skip
            else:
                new_peak, new_total, new_acc = _newest_of_chain(
                    few_q, keys, values, own, there, near, scale, c_slot, size, FEW, D, PRECISION
                )
            few_into = (into + stored) * each + few
            _store(peaks, totals, sums, few_into, new_peak, new_total, new_acc, d, size, there)

    tl.debug_barrier()  # all stores of this program come before its arrival is counted, or before its own loads
    merges = SINGLE
    if not SINGLE:
        counter = arrivals + which * tl.num_programs(1) + tile
        merges = tl.atomic_add(counter, 1) == workers
    if merges:
        last_peak, last_total, last_acc = _found(peaks, totals, sums, (into + stored) * each + at, d, size, real)
        if not SINGLE:
            tl.store(counter, 0)
            peak = tl.full([M], -float("inf"), tl.float32)
            total = tl.zeros([M], tl.float32)
            acc = tl.zeros([M, D], tl.float32)
            for i in range(
                0, units, 2
            ):  # two at once: a compiler does not move the second's loads before the first's sums
                here = (into + i) * each + at
                peak_0, total_0, acc_0 = _found(peaks, totals, sums, here, d, size, real)
                peak_1, total_1, acc_1 = _found(
                    peaks, totals, sums, here + each, d, size, real & (at * 0 + i + 1 < units)
                )
                peak, total, acc = _merge(peak, total, acc, peak_0, total_0, acc_0)
                peak, total, acc = _merge(peak, total, acc, peak_1, total_1, acc_1)
        peak, total, acc = _merge(peak, total, acc, last_peak, last_total, last_acc)
        result = (acc / tl.where(real, total, 1.0)[:, None]).to(out.dtype.element_ty)
        out += row * o_row + head * groups * size
        tl.store(out + (node * o_node + group * size)[:, None] + d[None, :], result, mask=real[:, None] & in_size)


PROGRAMS = 396
"""Enough programs to fill a GPU; if rows and heads make fewer, the keys are split among programs."""
COUNTERS = 1 << 16
"""The most tiles of one pass."""
MOST = 128 << 20
"""Bytes of partial sums at most; one program per tile needs none."""
LONG = 2048
"""Slots of a cache above which reading keys costs more than merging parts."""


def plan(programs: int, queries: int, slots: int, dtype: torch.dtype, d: int) -> dict[str, Any]:
    """Launch parameters for `programs` = rows · key heads, each with this many queries and slots.

    The fastest of some dozens on an H200. Only BLOCK has an influence on the bits, so it depends on the model alone.
    FEW is at most 32: from 64 on, Triton 3.6 leaves an instruction running while its registers are overwritten.
    """
    full, short = dtype == torch.float32, slots <= LONG
    m = 16 if queries <= (64 if short else 16) else 32 if queries <= 64 else 64
    prefix = 1 if m == 16 else 4
    workers = PROGRAMS // (programs * triton.cdiv(queries, m)) - 1
    return {
        "workers": max(0, min(workers, parts_of(slots) + 1 - prefix, 4 if short else 7)),
        "PREFIX": prefix,
        "M": m,
        "FEW": min(m, 32),
        "BLOCK": 32 if full or d > 128 else 64,
        "PRECISION": "ieee" if full else "tf32",
        "num_warps": 4,
        "num_stages": 2 if full or d > 128 or m > 16 else 3,
        **({} if full or m == 64 else {"maxnreg": 168}),
    }


def attend(
    query: Tensor, keys: Tensor, values: Tensor, packed: Tensor, arrivals: Tensor, scaling: float, deep: int = 0
) -> Tensor:
    """See naive.py. The last axis of every tensor is contiguous; keys and values have equal strides.

    `arrivals` holds COUNTERS zeros. They are zeros again afterwards; no other pass may use them meanwhile.
    """
    batch, n, heads, size = query.shape
    kv_heads = keys.shape[1]
    groups = heads // kv_heads
    d = max(16, triton.next_power_of_2(size))
    shared = plan(batch * kv_heads, groups * n, keys.shape[2], query.dtype, d)
    tiles, workers = triton.cdiv(groups * n, shared["M"]), shared.pop("workers")
    if 4 * batch * heads * n * size * (parts_of(keys.shape[2]) + 1) > MOST:
        workers = 0
    assert batch * kv_heads * tiles <= COUNTERS
    stored = parts_of(keys.shape[2]) if workers else 0
    sums = torch.empty(batch * kv_heads, stored + 1, groups * n, size, dtype=torch.float32, device=query.device)
    peaks, totals = torch.empty(2, *sums.shape[:3], dtype=torch.float32, device=query.device)
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    tree = packed.shape[-1] > BITS
    launch(
        _tree_attention, (workers + 1, tiles, batch * kv_heads), query.device,
        query, keys, values, packed, sums, peaks, totals, arrivals, out,
        *query.stride()[:2], *keys.stride()[:3], packed.stride(0), packed.stride(2), *out.stride()[:2],
        n, groups, size, kv_heads, scaling, max(1, workers), stored,
        NEWEST=max(NEWEST, triton.next_power_of_2(deep)), BLOCKS=triton.cdiv(n, 64) if tree else 0,
        NODES=min(64, max(16, triton.next_power_of_2(n))), SINGLE=workers == 0, D=d, **shared,
    )  # fmt: skip
    return out
