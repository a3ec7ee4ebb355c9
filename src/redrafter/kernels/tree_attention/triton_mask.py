"""The packed mask in one kernel."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from redrafter.kernels.tree_attention.naive import EVERYTHING, NEWEST, SLOTS, newest_for


@triton.jit(do_not_specialize=["n"])
def _pack_mask(
    lengths, depths, mask, places, out, window, n, columns,
    PLACES: tl.constexpr, NEWEST: tl.constexpr,
):  # fmt: skip
    """One node's line."""
    row, node = tl.program_id(0), tl.program_id(1)
    at = (row * n + node).to(tl.int64)
    into = out + at * columns
    length, own = tl.load(lengths + row), tl.load(depths + at)
    tl.store(into, length)
    tl.store(into + 1, own)
    tl.store(into + 2, window)
    tl.store(into + 3, tl.load(places + row) if PLACES else row.to(tl.int64))
    if NEWEST > 0:
        column = tl.arange(0, NEWEST)
        level = own + 1 - NEWEST + column
        slot = tl.where(level < 0, tl.maximum(length + level, -1), -1)
        for start in range(0, n, 64):
            other = start + tl.arange(0, 64)
            seen = tl.load(mask + at * n + other, mask=other < n, other=0) != 0
            depth = tl.load(depths + row * n + other, mask=other < n, other=-1)
            on_path = seen[None, :] & (depth[None, :] == level[:, None])
            slot = tl.maximum(slot, tl.max(tl.where(on_path, length + other[None, :], -1), 1))
        tl.store(into + 4 + column, slot)


def pack_mask(
    lengths: Tensor,
    depths: Tensor,
    mask: Tensor | None,
    window: int | None = None,
    places: Tensor | None = None,
    deep: int = NEWEST - 1,
) -> Tensor:
    """See naive.py."""
    batch, n = depths.shape
    newest = 0 if mask is None else newest_for(deep)
    out = torch.empty(batch, 1, n, SLOTS + newest, dtype=torch.long, device=depths.device)
    mask = depths if mask is None else mask.contiguous().view(torch.uint8)
    _pack_mask[batch, n](
        lengths.contiguous(), depths.contiguous(), mask, lengths if places is None else places.contiguous(), out,
        EVERYTHING if window is None else window, n, out.shape[-1],
        PLACES=places is not None, NEWEST=newest, num_warps=2,
    )  # fmt: skip
    return out
