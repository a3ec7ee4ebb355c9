"""Commit of all layers in one launch."""

import triton
import triton.language as tl
from torch import Tensor

from redrafter.kernels.launch import submit


@triton.jit
def _commit(
    cache, lengths, path, rows, heads, length, size, c_layer, c_pair, c_row, c_head, c_slot, p_row,
    P: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Commit one head of one row of one layer, keys or values."""
    which = tl.program_id(0)
    head, row, pair = (which % heads).to(tl.int64), which // heads % rows, which // heads // rows
    base = cache + (pair // 2).to(tl.int64) * c_layer + (pair % 2) * c_pair + row.to(tl.int64) * c_row + head * c_head
    base += tl.load(lengths + row) * c_slot
    place, d = tl.arange(0, P), tl.arange(0, D)
    node = tl.load(path + row * p_row + place, mask=place < length, other=0)
    # A path is in depth order, so its j-th node is in slot j or later; one that is in slot j stays.
    here = ((place < length) & (node != place))[:, None] & (d < size)[None, :]
    found = tl.load(base + node[:, None] * c_slot + d[None, :], mask=here)
    tl.debug_barrier()  # the whole path is in registers before any of it is written
    tl.store(base + place[:, None] * c_slot + d[None, :], found, mask=here)


def commit(cache: Tensor, lengths: Tensor, path: Tensor) -> None:
    """See naive.py; the last axis must be contiguous."""
    layers, pairs, rows, heads, _, size = cache.shape
    submit(
        _commit, (layers * pairs * rows * heads,),
        cache, lengths, path, rows, heads, path.shape[1], size, *cache.stride()[:5], path.stride(0),
        P=triton.next_power_of_2(path.shape[1]), D=triton.next_power_of_2(size), num_warps=1,
    )  # fmt: skip
