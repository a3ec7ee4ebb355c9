"""The table of tiles: which queries a program of tree attention computes. Made once per pass, for all layers."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from redrafter.kernels.launch import submit


@triton.jit(do_not_specialize=["count", "tiles"])
def _write_tiles(
    runs, table, count, tiles, groups, r_row, r_column,
    M: tl.constexpr, RUNS: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    """SOME tiles: a run's first line, its number of lines, and the tile's first query within the run."""
    run = tl.arange(0, RUNS)
    first = tl.load(runs + run * r_row, mask=run < count, other=0).to(tl.int32)
    lines = tl.load(runs + run * r_row + r_column, mask=run < count, other=0).to(tl.int32)
    its_tiles = tl.cdiv(lines * groups, M)
    end = tl.cumsum(its_tiles, 0)
    begin = end - its_tiles
    tile = tl.program_id(0) * SOME + tl.arange(0, SOME)
    of_run = (tile[:, None] >= begin[None, :]) & (tile[:, None] < end[None, :])  # of one run at most
    at = table + tile * 3
    tl.store(at, tl.sum(tl.where(of_run, first[None, :], 0), 1), mask=tile < tiles)
    tl.store(at + 1, tl.sum(tl.where(of_run, lines[None, :], 0), 1), mask=tile < tiles)
    tl.store(at + 2, tl.sum(tl.where(of_run, (tile[:, None] - begin[None, :]) * M, 0), 1), mask=tile < tiles)


@triton.jit
def tile_of(table, tile):
    """A line of the table. A tile without lines is empty."""
    at = table + tile * 3
    return tl.load(at), tl.load(at + 1), tl.load(at + 2)


def most_tiles(tokens: int, runs: int, groups: int, m: int) -> int:
    """The most tiles of `m` queries that runs with so many tokens in all can need, with `groups` queries per token.

    >>> most_tiles(32, 32, 1, 16), most_tiles(64, 1, 1, 16), most_tiles(65, 2, 4, 16), most_tiles(5, 8, 1, 16)
    (32, 4, 17, 5)
    """
    empty = min(runs, tokens) * (m - math.gcd(groups, m))  # places of the runs' last tiles at most
    return (groups * tokens + empty) // m


def write_tiles(runs: Tensor, tiles: int, groups: int, m: int) -> Tensor:
    """The table (tiles, 3) int32 of runs (R, 2) that need no more than so many tiles; the other tiles are empty."""
    table = torch.empty(tiles, 3, dtype=torch.int32, device=runs.device)
    some = 16
    submit(
        _write_tiles, (triton.cdiv(tiles, some),), runs, table, len(runs), tiles, groups, *runs.stride(),
        M=m, RUNS=triton.next_power_of_2(len(runs)), SOME=some, num_warps=4,
    )  # fmt: skip
    return table
