"""Tree attention in three kernels: for many queries on a long cache, or for so many tiles that none is shared.

One kernel takes the newest keys, a second one the older keys at the same time, a third one merges the parts. There are
two kernels if one program computes all parts of a tile: the second kernel then writes the result.
"""

import triton
import triton.language as tl

from redrafter.kernels.launch import gdc_launch_dependents, gdc_wait, wait_for_previous
from redrafter.kernels.tree_attention.triton_parts import add, count_parts, merged, newest, parts_between, store, stored


@triton.jit(do_not_specialize=["n", "last"])
def newest_keys(
    query, keys, values, packed, sums, peaks, totals,
    q_row, q_node, c_row, c_head, c_slot, m_row, m_node, n, groups, size, kv_heads, scale, last,
    NEWEST: tl.constexpr, TREE: tl.constexpr, M: tl.constexpr, D: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The newest keys of M queries, which become part `last`."""
    tile, which = tl.program_id(0), tl.program_id(1)
    row, head = (which // kv_heads).to(tl.int64), (which % kv_heads).to(tl.int64)
    about = packed + row * m_row
    length, place = tl.load(about).to(tl.int32), tl.load(about + 3)
    window = tl.minimum(tl.load(about + 2), 1 << 30).to(tl.int32)
    each = groups * n
    at = tile * M + tl.arange(0, M)  # group by group, node by node
    real = at < each
    group, node = at // n, at % n
    position = length + tl.load(about + node * m_node + 1, mask=real, other=0).to(tl.int32)
    keys += place * c_row + head * c_head
    values += place * c_row + head * c_head
    query += row * q_row + head * groups * size
    peak, total, acc = newest(
        query + node * q_node + group * size, keys, values, about + node * m_node + 4, position, real, window, scale,
        c_slot, size, NEWEST, TREE, D, EARLY,
    )  # fmt: skip
    into = (which.to(tl.int64) * (last + 1) + last) * each
    store(peaks, totals, sums, into + at, peak, total, acc, tl.arange(0, D), size, real)


@triton.jit(do_not_specialize=["n", "last"])
def older_keys(
    query, keys, values, packed, sums, peaks, totals, out,
    q_row, q_node, c_row, c_head, c_slot, m_row, m_node, o_row, o_node, n, groups, size, kv_heads, scale, last,
    NEWEST: tl.constexpr, SINGLE: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
    PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Older keys of M queries that share a key head: parts by the programs of the last axis. If SINGLE, one program
    computes all parts, adds the newest keys and writes the result.

    What this kernel reads was complete when `newest_keys`, the kernel before it, let it start: the queries, and keys
    that are older than theirs. So this kernel waits for `newest_keys` only at the end. It lets the next kernel start
    before it waits, so that kernel must touch neither the parts nor the result before its own wait.
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
    into = which.to(tl.int64) * (last + 1)
    at = tile * M + tl.arange(0, M)
    real = at < each
    group, node = at // n, at % n
    position = length + tl.load(about + node * m_node + 1, mask=real, other=0).to(tl.int32)
    border = tl.where(real, tl.maximum(position + 1 - NEWEST, 0), 0)
    highest = tl.max(border, 0)
    count = count_parts(highest)
    d = tl.arange(0, D)
    in_size = (d < size)[None, :]
    of_head = head * groups * size
    q_at = (node * q_node + group * size)[:, None] + d[None, :]
    # Not by way of L1: every layer's queries are in the same memory, and this kernel has not waited yet, so that a line
    # there may still be of the layer before.
    q = tl.load(query + row * q_row + of_head + q_at, mask=real[:, None] & in_size, other=0.0, cache_modifier=".cg")
    first = tl.maximum(position - window + 1, 0)
    lowest = tl.min(tl.where(real, first, 1 << 30), 0) // BLOCK * BLOCK
    if SINGLE:
        peak, total, acc = parts_between(
            q, keys, values, border, first, lowest, highest, 0, count, scale, c_slot, size, M, BLOCK, D, PRECISION
        )
        if EARLY:
            gdc_wait()
        new_peak, new_total, new_acc = stored(peaks, totals, sums, into * each + at, d, size, real)
        peak, total, acc = add(peak, total, acc, new_peak, new_total, new_acc)
        result = (acc / tl.where(real, total, 1.0)[:, None]).to(out.dtype.element_ty)
        o_at = (node * o_node + group * size)[:, None] + d[None, :]
        tl.store(out + row * o_row + of_head + o_at, result, mask=real[:, None] & in_size)
    else:
        for turn in range(worker, count, tl.num_programs(2)):
            part = count - 1 - turn  # the longest first
            peak, total, acc = parts_between(
                q, keys, values, border, first, lowest, highest, part, part + 1, scale, c_slot, size, M, BLOCK, D,
                PRECISION,
            )  # fmt: skip
            store(peaks, totals, sums, (into + part) * each + at, peak, total, acc, d, size, real)
        if EARLY:
            gdc_wait()  # a kernel that waits for this one thereby waits for `newest_keys` too


@triton.jit(do_not_specialize=["n", "last"])
def merge_parts(
    packed, sums, peaks, totals, out, m_row, m_node, o_row, o_node, n, groups, size, kv_heads, last,
    NEWEST: tl.constexpr, M: tl.constexpr, D: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Add up the parts of M queries."""
    tile, which = tl.program_id(0), tl.program_id(1)
    row, head = (which // kv_heads).to(tl.int64), (which % kv_heads).to(tl.int64)
    about = packed + row * m_row
    each = groups * n
    at = tile * M + tl.arange(0, M)
    real = at < each
    group, node = at // n, at % n
    position = (tl.load(about) + tl.load(about + node * m_node + 1, mask=real, other=0)).to(tl.int32)
    count = count_parts(tl.max(tl.where(real, tl.maximum(position + 1 - NEWEST, 0), 0), 0))
    d = tl.arange(0, D)
    wait_for_previous(EARLY)
    into = which.to(tl.int64) * (last + 1)
    result = merged(peaks, totals, sums, into, each, at, count, last, d, size, real, M, D).to(out.dtype.element_ty)
    out += row * o_row + head * groups * size
    o_at = (node * o_node + group * size)[:, None] + d[None, :]
    tl.store(out + o_at, result, mask=real[:, None] & (d < size)[None, :])
