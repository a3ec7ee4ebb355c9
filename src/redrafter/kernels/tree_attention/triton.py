"""Tree attention. A node gets the bits that it gets in plain decoding of its path.

A query at position p sums over its keys in the order of their positions, in parts that depend on p alone:

- keys up to p - NEWEST: in blocks at fixed positions. These keys are in the slots of their positions, in a tree as in
  plain decoding. A tensor core adds 16 products in an order of its own, but a weight of exactly zero changes no sum.
- the NEWEST keys up to p, which a tree scatters over its slots: gathered for each query, and added in the same order.

Long texts are split into parts at fixed positions, which different programs compute. Parts are merged in their order:
by the last program of one kernel (here), or by a kernel of its own (triton_split.py). The bits depend neither on the
number of kernels, nor on the number of queries of a program, nor on the tensor core instruction, because all sums over
older keys are a tensor core's, and every multiplication before an addition is exact or an explicit `fma`. This holds
for 16-bit models; fp32 has no promise.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from redrafter.kernels.launch import launch, wait_for_previous
from redrafter.kernels.tree_attention.naive import NEWEST, newest_of
from redrafter.kernels.tree_attention.triton_parts import count_parts, merged, newest, parts_between, parts_of, store
from redrafter.kernels.tree_attention.triton_split import merge_parts, newest_keys, older_keys


@triton.jit(do_not_specialize=["n", "workers", "last"])
def _tree_attention(
    query, keys, values, packed, sums, peaks, totals, arrivals, out,
    q_row, q_node, c_row, c_head, c_slot, m_row, m_node, o_row, o_node, n, groups, size, kv_heads, scale, workers, last,
    NEWEST: tl.constexpr, TREE: tl.constexpr, M: tl.constexpr, FEW: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
    PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """M queries that share a key head. The first programs compute the newest keys, of FEW queries at a time, and
    `workers` more programs parts of the older keys; the last program to finish merges the parts."""
    tile, which, role = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    newest_programs = tl.num_programs(2) - workers
    row, head = (which // kv_heads).to(tl.int64), (which % kv_heads).to(tl.int64)
    about = packed + row * m_row
    length, place = tl.load(about).to(tl.int32), tl.load(about + 3)
    window = tl.minimum(tl.load(about + 2), 1 << 30).to(tl.int32)
    keys += place * c_row + head * c_head
    values += place * c_row + head * c_head
    query += row * q_row + head * groups * size
    each = groups * n
    into = which.to(tl.int64) * (last + 1)
    d = tl.arange(0, D)
    in_size = (d < size)[None, :]
    at = tile * M + tl.arange(0, M)  # group by group, node by node
    real = at < each
    group, node = at // n, at % n
    position = length + tl.load(about + node * m_node + 1, mask=real, other=0).to(tl.int32)
    border = tl.where(real, tl.maximum(position + 1 - NEWEST, 0), 0)
    highest = tl.max(border, 0)
    parts = count_parts(highest)

    if role >= newest_programs:
        wait_for_previous(EARLY)  # only now: the mask is older than the kernel before this one
        q_at = (node * q_node + group * size)[:, None] + d[None, :]
        q = tl.load(query + q_at, mask=real[:, None] & in_size, other=0.0)
        first = tl.maximum(position - window + 1, 0)
        lowest = tl.min(tl.where(real, first, 1 << 30), 0) // BLOCK * BLOCK
        for turn in range(role - newest_programs, parts, workers):
            part = parts - 1 - turn  # the longest first
            peak, total, acc = parts_between(
                q, keys, values, border, first, lowest, highest, part, part + 1, scale, c_slot, size, M, BLOCK, D,
                PRECISION,
            )  # fmt: skip
            store(peaks, totals, sums, (into + part) * each + at, peak, total, acc, d, size, real)
    else:
        for start in range(role * FEW, tl.minimum(M, each - tile * M), newest_programs * FEW):
            few = tile * M + start + tl.arange(0, FEW)
            there = few < each
            its_group, its_node = few // n, few % n
            own = length + tl.load(about + its_node * m_node + 1, mask=there, other=0).to(tl.int32)
            new_peak, new_total, new_acc = newest(
                query + its_node * q_node + its_group * size, keys, values, about + its_node * m_node + 4, own, there,
                window, scale, c_slot, size, NEWEST, TREE, D, EARLY,
            )  # fmt: skip
            store(peaks, totals, sums, (into + last) * each + few, new_peak, new_total, new_acc, d, size, there)
        wait_for_previous(EARLY)  # a program without queries, too

    tl.debug_barrier()  # all stores of this program come before its arrival is counted
    counter = arrivals + which * tl.num_programs(0) + tile
    if tl.atomic_add(counter, 1) == tl.num_programs(2) - 1:
        tl.store(counter, 0)
        result = merged(peaks, totals, sums, into, each, at, parts, last, d, size, real, M, D).to(out.dtype.element_ty)
        out += row * o_row + head * groups * size
        tl.store(out + (node * o_node + group * size)[:, None] + d[None, :], result, mask=real[:, None] & in_size)


PROGRAMS = 396
"""Enough programs to fill a GPU; if rows and heads make fewer, the keys are split among programs."""
COUNTERS = PROGRAMS
"""The most tiles of a pass in one kernel: `plan` gives each of them two programs or more, of PROGRAMS in all."""
MOST = 128 << 20
"""Bytes of partial sums at most; one program per tile needs none."""
GATHERED = 128
"""Newest keys that a program gathers: those of 8 queries, unless a tree is deep."""
MERGED = 8
"""Queries whose parts a program merges."""
LONG = 1536
"""Slots of a cache above which three kernels are faster for many queries, although each costs a launch."""


def plan(programs: int, queries: int, slots: int, dtype: torch.dtype, d: int) -> dict[str, Any]:
    """Launch parameters for `programs` = rows · key heads, each with this many queries and slots.

    With `newest_programs`, one kernel computes all. Without `workers`, one program computes all older keys of a tile.
    These parameters are the fastest of some hundreds on an H200. Only BLOCK has an influence on the bits, so it depends
    on the model alone.
    """
    full = dtype == torch.float32
    large = full or d > 128
    common = {
        "BLOCK": 32 if large else 64,
        "PRECISION": "ieee" if full else "tf32",
        "num_warps": 4,
        "num_stages": 2 if large else 3,
    }
    share = PROGRAMS // (programs * triton.cdiv(queries, 16))  # programs of a tile of 16 queries
    if share >= 2 and (queries <= 16 or slots <= LONG):
        parts = parts_of(slots)
        turns = triton.cdiv(parts, share - 1)
        workers = triton.cdiv(parts, turns)
        registers = {} if full or torch.version.hip else {"maxnreg": 168}  # AMD's compiler knows no such option
        return common | {"newest_programs": 1, "workers": workers, "M": 16, **registers}
    m = 16 if queries <= 16 else 64
    share = PROGRAMS // (programs * triton.cdiv(queries, m))
    workers = 0 if share < 2 else min(share, parts_of(slots))
    return common | {"newest_programs": 0, "workers": workers, "M": m}


def attend(query: Tensor, keys: Tensor, values: Tensor, packed: Tensor, arrivals: Tensor, scaling: float) -> Tensor:
    """See naive.py. The last axis of every tensor is contiguous; keys and values have equal strides.

    `arrivals` holds COUNTERS zeros. They are zeros again afterwards; no other pass may use them meanwhile. The kernels
    read `packed` before they wait for the kernel before them, so that kernel must not be the one that writes `packed`.
    """
    batch, n, heads, size = query.shape
    kv_heads = keys.shape[1]
    groups = heads // kv_heads
    programs, each = batch * kv_heads, groups * n
    d = max(16, triton.next_power_of_2(size))
    chosen = plan(programs, each, keys.shape[2], query.dtype, d)
    newest_programs, workers = chosen.pop("newest_programs"), chosen.pop("workers")
    if 4 * batch * heads * n * size * (parts_of(keys.shape[2]) + 1) > MOST:
        newest_programs = workers = 0
    last = parts_of(keys.shape[2]) if workers else 0
    sums = torch.empty(programs, last + 1, each, size, dtype=torch.float32, device=query.device)
    peaks, totals = torch.empty(2, *sums.shape[:3], dtype=torch.float32, device=query.device)
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    scale = scaling * 1.44269504  # the hardware has exp2, not exp
    tree, count = newest_of(packed) > 0, newest_of(packed) or NEWEST
    few, tiles = max(1, GATHERED // count), triton.cdiv(each, chosen["M"])
    read = (query, keys, values, packed, sums, peaks, totals)
    strides = (*query.stride()[:2], *keys.stride()[:3], packed.stride(0), packed.stride(2))
    written, sizes = out.stride()[:2], (n, groups, size, kv_heads)
    if newest_programs:
        assert programs * tiles <= COUNTERS
        launch(
            _tree_attention, (tiles, programs, newest_programs + workers), query.device,
            *read, arrivals, out, *strides, *written, *sizes, scale, workers, last,
            NEWEST=count, TREE=tree, FEW=few, D=d, **chosen,
        )  # fmt: skip
        return out
    launch(
        newest_keys, (triton.cdiv(each, few), programs), query.device, *read, *strides, *sizes, scale, last,
        NEWEST=count, TREE=tree, M=few, D=d, num_warps=4,
    )  # fmt: skip
    launch(
        older_keys, (tiles, programs, max(1, workers)), query.device,
        *read, out, *strides, *written, *sizes, scale, last, NEWEST=count, SINGLE=workers == 0, D=d, **chosen,
    )  # fmt: skip
    if workers:
        launch(
            merge_parts, (triton.cdiv(each, MERGED), programs), query.device,
            packed, sums, peaks, totals, out, *strides[-2:], *written, *sizes, last,
            NEWEST=count, M=MERGED, D=d, num_warps=4,
        )  # fmt: skip
    return out
