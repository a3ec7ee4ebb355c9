"""The packed mask in one kernel."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from redrafter.kernels.tree_attention.naive import BITS, EVERYTHING


@triton.jit(do_not_specialize=["n"])
def _pack_mask(lengths, depths, mask, places, out, window, n, columns, PLACES: tl.constexpr, WORDS: tl.constexpr):
    """One node's line."""
    row, node = tl.program_id(0), tl.program_id(1)
    at = (row * n + node).to(tl.int64)
    into = out + at * columns
    tl.store(into, tl.load(lengths + row))
    tl.store(into + 1, tl.load(depths + at))
    tl.store(into + 2, window)
    tl.store(into + 3, tl.load(places + row) if PLACES else row.to(tl.int64))
    bit = tl.arange(0, 64)
    for word in tl.static_range(WORDS):
        j = word * 64 + bit
        seen = tl.load(mask + at * n + j, mask=j < n, other=0).to(tl.int64)
        tl.store(into + 4 + word, tl.sum(seen << bit.to(tl.int64), 0))


def pack_mask(
    lengths: Tensor, depths: Tensor, mask: Tensor | None, window: int | None = None, places: Tensor | None = None
) -> Tensor:
    """See naive.py."""
    batch, n = depths.shape
    words = 0 if mask is None else triton.cdiv(n, 64)
    out = torch.empty(batch, 1, n, BITS + words, dtype=torch.long, device=depths.device)
    mask = depths if mask is None else mask.contiguous().view(torch.uint8)
    _pack_mask[batch, n](
        lengths.contiguous(), depths.contiguous(), mask, lengths if places is None else places.contiguous(), out,
        EVERYTHING if window is None else window, n, BITS + words, PLACES=places is not None, WORDS=words, num_warps=2,
    )  # fmt: skip
    return out
