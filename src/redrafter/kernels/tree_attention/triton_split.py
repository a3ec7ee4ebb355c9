"""Tree attention in three kernels: for many queries on a long cache, or for so many tiles that none is shared.

One kernel takes the newest keys, a second one the older keys at the same time, a third one merges the parts. There are
two kernels if one program computes all parts of a tile: the second kernel then writes the result.
"""

import triton
import triton.language as tl

from redrafter.kernels.launch import gdc_launch_dependents, gdc_wait, wait_for_previous
from redrafter.kernels.tree_attention.triton_lines import COLUMNS, PLACE
from redrafter.kernels.tree_attention.triton_parts import (
    add,
    border_of,
    count_parts,
    mean,
    merged,
    newest,
    parts_between,
    queries_of,
    store,
    stored,
)
from redrafter.kernels.tree_attention.triton_tiles import tile_of


@triton.jit(do_not_specialize=["tokens", "last"])
def newest_keys(
    query, keys, values, lines, sums, peaks, totals,
    q_line, c_row, c_head, c_slot, tokens, groups, size, scale, last,
    M: tl.constexpr, D: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The newest keys of M queries of any rows, which become part `last`."""
    head = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * M + tl.arange(0, M)
    real, group, line, _, window = queries_of(lines, 0, tokens, at, groups)
    keys += head * c_head
    values += head * c_head
    query += head * groups * size
    peak, total, acc = newest(
        query + line * q_line + group * size, keys, values, lines, line, real, window, scale, c_row, c_slot, size, D,
        EARLY,
    )  # fmt: skip
    into = (head * (last + 1) + last) * groups * tokens
    store(peaks, totals, sums, into + at, peak, total, acc, tl.arange(0, D), size, real)


@triton.jit(do_not_specialize=["tokens", "last"])
def older_keys(
    query, keys, values, lines, table, sums, peaks, totals, out,
    q_line, c_row, c_head, c_slot, o_line, tokens, groups, size, scale, last,
    SINGLE: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Older keys of a tile's queries: parts by the programs of the last axis. If SINGLE, one program computes all
    parts, adds the newest keys and writes the result.

    What this kernel reads was complete when `newest_keys`, the kernel before it, let it start: the queries, and keys
    that are older than theirs. So this kernel waits for `newest_keys` only at the end. It lets the next kernel start
    before it waits, so that kernel must touch neither the parts nor the result before its own wait.
    """
    if EARLY:
        gdc_launch_dependents()
    head, worker = tl.program_id(1).to(tl.int64), tl.program_id(2)
    first_line, count, start = tile_of(table, tl.program_id(0))
    if count == 0:
        if EARLY:
            gdc_wait()
        return
    place = tl.load(lines + first_line.to(tl.int64) * COLUMNS + PLACE)
    keys += place * c_row + head * c_head
    values += place * c_row + head * c_head
    query += head * groups * size
    out += head * groups * size
    each = groups * tokens
    into = head * (last + 1)
    real, group, line, index, window = queries_of(lines, first_line, count, start + tl.arange(0, M), groups)
    at = group * tokens + line
    border = border_of(index, real)
    highest = tl.max(border, 0)
    parts = count_parts(highest)
    d = tl.arange(0, D)
    mask = real[:, None] & (d < size)[None, :]
    # Not by way of L1: every layer's queries are in the same memory, and this kernel has not waited yet, so that a line
    # there may still be of the layer before.
    q_at = (line * q_line + group * size)[:, None] + d[None, :]
    q = tl.load(query + q_at, mask=mask, other=0.0, cache_modifier=".cg")
    first = tl.maximum(index - window + 1, 0)
    lowest = tl.min(tl.where(real, first, 1 << 30), 0) // BLOCK * BLOCK
    if SINGLE:
        peak, total, acc = parts_between(
            q, keys, values, border, first, lowest, highest, 0, parts, scale, c_slot, size, M, BLOCK, D, PRECISION
        )
        if EARLY:
            gdc_wait()
        new_peak, new_total, new_acc = stored(peaks, totals, sums, into * each + at, d, size, real)
        peak, total, acc = add(peak, total, acc, new_peak, new_total, new_acc)
        o_at = (line * o_line + group * size)[:, None] + d[None, :]
        tl.store(out + o_at, mean(total, acc).to(out.dtype.element_ty), mask=mask)
    else:
        for turn in range(worker, parts, tl.num_programs(2)):
            part = parts - 1 - turn  # the longest first
            peak, total, acc = parts_between(
                q, keys, values, border, first, lowest, highest, part, part + 1, scale, c_slot, size, M, BLOCK, D,
                PRECISION,
            )  # fmt: skip
            store(peaks, totals, sums, (into + part) * each + at, peak, total, acc, d, size, real)
        if EARLY:
            gdc_wait()  # a kernel that waits for this one thereby waits for `newest_keys` too


@triton.jit(do_not_specialize=["tokens", "last"])
def merge_parts(
    lines, sums, peaks, totals, out, o_line, tokens, groups, size, last,
    M: tl.constexpr, D: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Add up the parts of M queries of any rows."""
    head = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * M + tl.arange(0, M)
    real, group, line, index, _ = queries_of(lines, 0, tokens, at, groups)
    border = border_of(index, real)
    d = tl.arange(0, D)
    wait_for_previous(EARLY)
    into, each = head * (last + 1), groups * tokens
    result = merged(peaks, totals, sums, into, each, at, border, last, d, size, real, M, D).to(out.dtype.element_ty)
    out += head * groups * size
    o_at = (line * o_line + group * size)[:, None] + d[None, :]
    tl.store(out + o_at, result, mask=real[:, None] & (d < size)[None, :])
