"""Tree attention. A token gets the bits that it gets in plain decoding of its path, whatever else is in the pass.

The query of index p sums over its keys in the order of their indices, in parts that depend on p alone:

- keys up to p - NEWEST: in blocks at fixed slots. These keys are in the slots of their indices, in a tree as in
  plain decoding. A tensor core adds 16 products in an order of its own, but a weight of exactly zero changes no sum.
- the NEWEST keys up to p, which a tree scatters over its slots: gathered for each query, and added in the same order.

Long texts are split into parts at fixed slots, which different programs compute. Parts are merged in their order:
by the last program of one kernel (here), or by a kernel of its own (triton_split.py). The bits depend neither on the
number of kernels, nor on the queries that share a program, nor on the tensor core instruction, because all sums over
older keys are a tensor core's, and every multiplication before an addition is exact or an explicit `fma`. This holds
for 16-bit models; fp32 has no promise.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from redrafter.kernels.launch import launch, wait_for_previous
from redrafter.kernels.tree_attention.triton_lines import COLUMNS, PLACE
from redrafter.kernels.tree_attention.triton_parts import (
    border_of,
    count_parts,
    merged,
    newest,
    parts_between,
    parts_of,
    queries_of,
    store,
)
from redrafter.kernels.tree_attention.triton_split import merge_parts, newest_keys, older_keys
from redrafter.kernels.tree_attention.triton_tiles import most_tiles, tile_of, write_tiles


@triton.jit(do_not_specialize=["tokens", "workers", "last"])
def _tree_attention(
    query, keys, values, lines, table, sums, peaks, totals, arrivals, out,
    q_line, c_row, c_head, c_slot, o_line, tokens, groups, size, scale, workers, last,
    M: tl.constexpr, FEW: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """The queries of a tile. The first programs compute the newest keys, of FEW queries at a time, and `workers` more
    programs parts of the older keys; the last program to finish merges the parts."""
    tile, head, role = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    newest_programs = tl.num_programs(2) - workers
    first_line, count, start = tile_of(table, tile)
    if count == 0:
        wait_for_previous(EARLY)  # the kernel after this one relies on the end of all kernels before
        return
    keys += head * c_head
    values += head * c_head
    query += head * groups * size
    each = groups * tokens
    into = head * (last + 1)
    d = tl.arange(0, D)
    in_size = (d < size)[None, :]
    real, group, line, index, window = queries_of(lines, first_line, count, start + tl.arange(0, M), groups)
    at = group * tokens + line
    border = border_of(index, real)

    if role >= newest_programs:
        row = tl.load(lines + first_line.to(tl.int64) * COLUMNS + PLACE) * c_row
        wait_for_previous(EARLY)  # only now: the lines are older than the kernel before this one
        q = tl.load(
            query + (line * q_line + group * size)[:, None] + d[None, :], mask=real[:, None] & in_size, other=0.0
        )
        first = tl.maximum(index - window + 1, 0)
        lowest = tl.min(tl.where(real, first, 1 << 30), 0) // BLOCK * BLOCK
        highest = tl.max(border, 0)
        parts = count_parts(highest)
        for turn in range(role - newest_programs, parts, workers):
            part = parts - 1 - turn  # the longest first
            peak, total, acc = parts_between(
                q, keys + row, values + row, border, first, lowest, highest, part, part + 1, scale, c_slot, size, M,
                BLOCK, D, PRECISION,
            )  # fmt: skip
            store(peaks, totals, sums, (into + part) * each + at, peak, total, acc, d, size, real)
    else:
        for begin in range(role * FEW, tl.minimum(M, groups * count - start), newest_programs * FEW):
            few = start + begin + tl.arange(0, FEW)
            there, its_group, its_line, _, its_window = queries_of(lines, first_line, count, few, groups)
            new_peak, new_total, new_acc = newest(
                query + its_line * q_line + its_group * size, keys, values, lines, its_line, there, its_window, scale,
                c_row, c_slot, size, D, EARLY,
            )  # fmt: skip
            its_at = (into + last) * each + its_group * tokens + its_line
            store(peaks, totals, sums, its_at, new_peak, new_total, new_acc, d, size, there)
        wait_for_previous(EARLY)  # a program without queries, too

    tl.debug_barrier()  # all stores of this program come before its arrival is counted
    counter = arrivals + head * tl.num_programs(0) + tile
    if tl.atomic_add(counter, 1) == tl.num_programs(2) - 1:
        tl.store(counter, 0)
        result = merged(peaks, totals, sums, into, each, at, border, last, d, size, real, M, D).to(out.dtype.element_ty)
        out += head * groups * size
        tl.store(out + (line * o_line + group * size)[:, None] + d[None, :], result, mask=real[:, None] & in_size)


PROGRAMS = 396
"""Enough programs to fill a GPU; if rows and heads make fewer, the keys are split among programs."""
COUNTERS = PROGRAMS
"""The most tiles of a pass in one kernel: `plan` gives each of them two programs or more, of PROGRAMS in all."""
MOST = 128 << 20
"""Bytes of partial sums at most; one program per tile needs none."""
GATHERED = 8
"""Queries whose newest keys a program gathers at once."""
MERGED = 8
"""Queries whose parts a program merges."""
LONG = 1536
"""Slots of a cache above which three kernels are faster for many queries, although each costs a launch."""


def plan(
    tokens: int, runs: int, heads: int, kv_heads: int, size: int, slots: int, dtype: torch.dtype
) -> dict[str, Any]:
    """Launch parameters for a pass of so many tokens and runs.

    With `newest_programs`, one kernel computes all. Without `workers`, one program computes all older keys of a tile.
    These parameters are the fastest of some hundreds on an H200. Only BLOCK has an influence on the bits, so it depends
    on the model alone.
    """
    full, groups = dtype == torch.float32, heads // kv_heads
    large = full or size > 128
    common = {
        "BLOCK": 32 if large else 64,
        "PRECISION": "ieee" if full else "tf32",
        "num_warps": 4,
        "num_stages": 2 if large else 3,
    }
    few = groups * (tokens // runs) <= 16  # the mean run fits a tile
    fits = 4 * heads * tokens * size * (parts_of(slots) + 1) <= MOST
    share = PROGRAMS // (kv_heads * most_tiles(tokens, runs, groups, 16))  # programs of a tile of 16 queries
    if share >= 2 and fits and (few or slots <= LONG):
        parts = parts_of(slots)
        turns = triton.cdiv(parts, share - 1)
        workers = triton.cdiv(parts, turns)
        registers = {} if full or torch.version.hip else {"maxnreg": 168}  # AMD's compiler knows no such option
        return common | {"newest_programs": 1, "workers": workers, "M": 16, **registers}
    m = 16 if few else 64
    share = PROGRAMS // (kv_heads * most_tiles(tokens, runs, groups, m))
    workers = min(share, parts_of(slots)) if share >= 2 and fits else 0
    return common | {"newest_programs": 0, "workers": workers, "M": m}


def tiles(
    runs: Tensor, tokens: int, heads: int, kv_heads: int, size: int, slots: int, dtype: torch.dtype
) -> tuple[Tensor, dict[str, Any]]:
    """The table of a pass's tiles, and its launch parameters."""
    settings = plan(tokens, len(runs), heads, kv_heads, size, slots, dtype)
    groups, m = heads // kv_heads, settings["M"]
    return write_tiles(runs, most_tiles(tokens, len(runs), groups, m), groups, m), settings


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lines: Tensor,
    table: Tensor,
    settings: dict[str, Any],
    arrivals: Tensor,
    scaling: float,
) -> Tensor:
    """See naive.py. The lines, the heads of a token and the last axis of every tensor are contiguous; keys and values
    have equal strides.

    `arrivals` holds COUNTERS zeros. They are zeros again afterwards; no other pass may use them meanwhile. The kernels
    read the lines and the table before they wait for the kernel before them, so that kernel must not be the one that
    writes either.
    """
    tokens, heads, size = query.shape
    kv_heads, count = keys.shape[1], len(table)
    groups = heads // kv_heads
    each, d = groups * tokens, max(16, triton.next_power_of_2(size))
    chosen = dict(settings)
    newest_programs, workers = chosen.pop("newest_programs"), chosen.pop("workers")
    last = parts_of(keys.shape[2]) if workers else 0
    sums = torch.empty(kv_heads, last + 1, each, size, dtype=torch.float32, device=query.device)
    peaks, totals = torch.empty(2, *sums.shape[:3], dtype=torch.float32, device=query.device)
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    scale = scaling * 1.44269504  # the hardware has exp2, not exp
    read, strides = (query, keys, values, lines), (query.stride(0), *keys.stride()[:3])
    parts, sizes = (sums, peaks, totals), (tokens, groups, size)
    if newest_programs:
        assert kv_heads * count <= COUNTERS
        launch(
            _tree_attention, (count, kv_heads, newest_programs + workers), query.device,
            *read, table, *parts, arrivals, out, *strides, out.stride(0), *sizes, scale, workers, last,
            FEW=GATHERED, D=d, **chosen,
        )  # fmt: skip
        return out
    launch(
        newest_keys, (triton.cdiv(each, GATHERED), kv_heads), query.device,
        *read, *parts, *strides, *sizes, scale, last, M=GATHERED, D=d, num_warps=4,
    )  # fmt: skip
    launch(
        older_keys, (count, kv_heads, max(1, workers)), query.device,
        *read, table, *parts, out, *strides, out.stride(0), *sizes, scale, last, SINGLE=workers == 0, D=d, **chosen,
    )  # fmt: skip
    if workers:
        launch(
            merge_parts, (triton.cdiv(each, MERGED), kv_heads), query.device,
            lines, *parts, out, out.stride(0), *sizes, last, M=MERGED, D=d, num_warps=4,
        )  # fmt: skip
    return out
