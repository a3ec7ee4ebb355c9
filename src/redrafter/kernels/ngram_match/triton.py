"""The longest, then most recent, earlier occurrence of a text's end, and what followed: one program for each text."""

import triton
import triton.language as tl
from torch import Tensor

from redrafter.kernels.launch import indices, launch, wait_for_previous

BLOCK = 2048
"""Places that a program compares at once. Longer texts take several rounds: four at 8,192 tokens."""


@triton.jit
def _chain(
    tokens, lengths, followed, sizes, slots, row_size,
    LONGEST: tl.constexpr, SHORTEST: tl.constexpr, LENGTH: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """A place's rank is the size of its match, then the place itself; the highest rank wins."""
    wait_for_previous(EARLY)
    row = tl.program_id(0).to(tl.int64)
    text = tokens + row * row_size
    length = tl.load(lengths + row).to(tl.int32)
    ranks = tl.full([BLOCK], -1, tl.int32)
    for start in range(0, length, BLOCK):
        place = start + tl.arange(0, BLOCK)
        size = tl.zeros([BLOCK], tl.int32)
        same = place < length
        for back in tl.static_range(1, LONGEST + 1):
            inside = (place >= back) & (place < length)
            last = tl.load(text + tl.maximum(length - back, 0))
            same &= inside & (tl.load(text + place - back, mask=inside, other=-1) == last)
            size += same.to(tl.int32)
        ranks = tl.maximum(ranks, tl.where(size >= SHORTEST, size * slots + place, -1))
    best = tl.max(ranks, 0)
    size = tl.maximum(best, 0) // slots
    first = tl.maximum(best, 0) - size * slots
    tl.store(sizes + row, size.to(tl.int64))
    step = tl.arange(0, PADDED)
    there = first + step % tl.maximum(length - first, 1)
    tl.store(followed + row * LENGTH + step, tl.load(text + there), mask=step < LENGTH)


def chain(tokens: Tensor, lengths: Tensor, longest: int, shortest: int, length: int) -> tuple[Tensor, Tensor]:
    """See naive.py."""
    batch, slots = tokens.shape
    followed, sizes = indices(batch, length, device=tokens.device), indices(batch, device=tokens.device)
    launch(
        _chain, (batch,), tokens.device,
        tokens, lengths, followed, sizes, slots, tokens.stride(0),
        LONGEST=longest, SHORTEST=shortest, LENGTH=length, PADDED=triton.next_power_of_2(length),
        BLOCK=min(BLOCK, max(128, triton.next_power_of_2(slots))), num_warps=8,
    )  # fmt: skip
    return followed, sizes
