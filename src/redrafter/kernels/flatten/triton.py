"""The lines of rows' trees in one launch: some programs write nodes, others padding.

Each program counts the real nodes of the rows before its own, so no program waits for another.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from redrafter.kernels.launch import indices, submit
from redrafter.kernels.tree_attention.triton_lines import (
    COLUMNS,
    EVERYTHING,
    INDEX,
    NEWEST,
    PLACE,
    POSITION,
    SLOT,
    SLOTS,
    TOKEN,
    WINDOW,
)


@triton.jit(do_not_specialize=["batch", "n", "chunks", "longest", "begin", "room"])
def _flatten(
    tokens, depths, mask, real, lengths, places, lines, runs, out,
    batch, n, chunks, longest, begin, room,
    t_row, t_node, d_row, d_node, m_row, m_node, m_other, r_row, r_node, l_row, p_row, run_row, run_column,
    FEW: tl.constexpr, OTHERS: tl.constexpr, COUNTED: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """FEW nodes of a row, or PADDED lines behind the last node. `room`: the number of lines."""
    program = tl.program_id(0)
    row = tl.minimum(program // chunks, batch)
    some = tl.arange(0, COUNTED)
    sums = tl.zeros([COUNTED], tl.int32)
    for start in range(0, row * n, COUNTED):
        at = start + some
        sums += tl.load(real + at // n * r_row + at % n * r_node, mask=at < row * n, other=0) != 0
    first = begin + tl.sum(sums, 0)

    if program >= batch * chunks:
        empty = first + (program - batch * chunks) * PADDED + tl.arange(0, PADDED)
        column = tl.arange(0, 32)[None, :]
        everything = tl.full([PADDED, 32], EVERYTHING, tl.int64)
        value = tl.where(column == WINDOW, everything, tl.where(column >= SLOT, -1, 0))
        tl.store(lines + empty[:, None] * COLUMNS + column, value, mask=(empty < room)[:, None] & (column < COLUMNS))
    else:
        node = program % chunks * FEW + tl.arange(0, FEW)
        there = node < n
        length, place = tl.load(lengths + row * l_row), tl.load(places + row * p_row)
        depth = tl.load(depths + row * d_row + node * d_node, mask=there, other=0)
        level = depth[:, None] + 1 - NEWEST + tl.arange(0, NEWEST)[None, :]
        rank, above = tl.zeros([FEW], tl.int32), tl.full([FEW, NEWEST], -1, tl.int32)
        count = tl.sum(tl.zeros([OTHERS], tl.int32), 0)
        for start in range(0, n, OTHERS):
            other = start + tl.arange(0, OTHERS)
            kept = tl.load(real + row * r_row + other * r_node, mask=other < n, other=0) != 0
            count += tl.sum(kept.to(tl.int32), 0)
            rank += tl.sum((kept[None, :] & (other[None, :] < node[:, None])).to(tl.int32), 1)
            both = there[:, None] & (other < n)[None, :]
            seen = tl.load(mask + row * m_row + node[:, None] * m_node + other[None, :] * m_other, mask=both, other=0)
            other_depth = tl.load(depths + row * d_row + other * d_node, mask=other < n, other=0)
            on_path = (seen != 0)[:, None, :] & (other_depth[None, None, :] == level[:, :, None])
            above = tl.maximum(above, tl.max(tl.where(on_path, other[None, None, :], -1), 2))
        own = tl.load(real + row * r_row + node * r_node, mask=there, other=0) != 0
        line = tl.where(own, first + rank, first)
        tl.store(out + row * n + node, line.to(tl.int64), mask=there)
        if program % chunks == 0:
            tl.store(runs + row * run_row, first.to(tl.int64))
            tl.store(runs + row * run_row + run_column, count.to(tl.int64))

        into, written = lines + line * COLUMNS, own & (line < room)
        index = length + depth
        tl.store(into + TOKEN, tl.load(tokens + row * t_row + node * t_node, mask=written), mask=written)
        tl.store(into + POSITION, tl.minimum(index, longest), mask=written)
        tl.store(into + INDEX, index, mask=written)
        tl.store(into + WINDOW, tl.full([FEW], EVERYTHING, tl.int64), mask=written)
        tl.store(into + PLACE, place + tl.zeros([FEW], tl.int64), mask=written)
        tl.store(into + SLOT, length + node, mask=written)
        slot = tl.where(level < 0, tl.maximum(length + level, -1), tl.where(above >= 0, length + above, -1))
        tl.store(into[:, None] + SLOTS + tl.arange(0, NEWEST)[None, :], slot, mask=written[:, None])


FEW = 8
"""Nodes that a program writes."""
OTHERS = 32
"""Nodes that a program compares with its own at once."""


def flatten(
    tokens: Tensor,
    depths: Tensor,
    mask: Tensor,
    real: Tensor,
    lengths: Tensor,
    places: Tensor,
    longest: int,
    lines: Tensor,
    runs: Tensor,
    begin: int,
) -> Tensor:
    """See naive.py. `lines` is contiguous; all other tensors may have any strides."""
    batch, n = tokens.shape
    out = indices(batch, n, device=tokens.device)
    few, padded = min(FEW, triton.next_power_of_2(n)), 32
    chunks = triton.cdiv(n, few)
    submit(
        _flatten, (batch * chunks + triton.cdiv(len(lines) - begin, padded),),
        tokens, depths, mask.view(torch.uint8), real.view(torch.uint8), lengths, places, lines, runs, out,
        batch, n, chunks, longest, begin, len(lines),
        *tokens.stride(), *depths.stride(), *mask.stride(), *real.stride(), *lengths.stride(), *places.stride(),
        *runs.stride(), FEW=few, OTHERS=min(OTHERS, triton.next_power_of_2(n)), COUNTED=1024, PADDED=padded,
        num_warps=4,
    )  # fmt: skip
    return out
