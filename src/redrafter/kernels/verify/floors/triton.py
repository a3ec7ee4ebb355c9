"""The smallest logit of each row that top-k, top-p and min-p keep, without a sort; naive.py is the oracle.

The edge of top-k is the smallest t such that fewer than k logits exceed t; the edge of top-p is the smallest t such
that the logits above t hold less than p of the mass. A bisection over the bits of a logit finds t; each of its steps
reads the row once, from the GPU's cache. The kernel writes nothing of a row's size.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from redrafter.kernels.launch import submit
from redrafter.kernels.verify.noise import LOG2E

BLOCK = 8192
"""Logits read at once, 8 per thread; three more tiles are prefetched meanwhile."""


@triton.jit
def _tile(row, start, vocab, stride, BLOCK: tl.constexpr):
    at = start + tl.arange(0, BLOCK)
    return tl.load(row + at.to(tl.int64) * stride, mask=at < vocab, other=-float("inf")).to(tl.float32)


@triton.jit
def _above(row, edge, top, unit, vocab, stride, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """How many logits exceed the edge, or their total weight."""
    total = tl.zeros([BLOCK], tl.float32)  # also counts: exact below 2^24
    for start in tl.range(0, vocab, BLOCK, num_stages=4):
        x = _tile(row, start, vocab, stride, BLOCK)
        weight = 1.0
        if MASS:
            weight = tl.exp2((x - top) * unit)
        total += tl.where(x > edge, weight, 0.0)
    return tl.sum(total, 0)


@triton.jit
def _number(key, SHIFT: tl.constexpr):
    """The key-th number, counted from 0 up and down; the lowest SHIFT bits of each are 0, as in the logits' dtype."""
    low: tl.constexpr = (1 << SHIFT) - 1
    bits = (key << SHIFT) | tl.where(key < 0, low, 0)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _key(x, SHIFT: tl.constexpr):
    bits = x.to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> SHIFT


@triton.jit
def _least(row, bound, top, unit, vocab, stride, MASS: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """The smallest number above which there is less than the bound. It is one of the row's logits."""
    # The total above `low` reaches the bound; nothing is above `high`.
    low, high = _key(tl.full([], -float("inf"), tl.float32), SHIFT) - 1, _key(top, SHIFT)
    while high - low > 1:
        middle = low + (high - low) // 2
        if _above(row, _number(middle, SHIFT), top, unit, vocab, stride, MASS, BLOCK) < bound:
            high = middle
        else:
            low = middle
    return _number(high, SHIFT)


@triton.jit
def _floor(
    logits, temperature, top_k, top_p, log_min_p, out, vocab, l_row, l_node, l_token,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    node, which = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = logits + which * l_row + node.to(tl.int64) * l_node
    scale = tl.load(temperature + which)
    scale = tl.where(scale > 0, scale, 1.0)
    k, p = tl.load(top_k + which), tl.load(top_p + which)
    most = tl.full([BLOCK], -float("inf"), tl.float32)
    for start in tl.range(0, vocab, BLOCK, num_stages=4):
        most = tl.maximum(most, _tile(row, start, vocab, l_token, BLOCK))
    top = tl.max(most, 0)
    unit, edge = LOG2E / scale, tl.full([], -float("inf"), tl.float32)
    if k < vocab:
        edge = _least(row, k.to(tl.float32), top, unit, vocab, l_token, False, SHIFT, BLOCK)
    if p < float("inf"):
        above = _above(row, edge, top, unit, vocab, l_token, False, BLOCK)
        mass = _above(row, edge, top, unit, vocab, l_token, True, BLOCK)
        if k < vocab:  # of the logits at the edge, only as many as top-k leaves
            mass += (k.to(tl.float32) - above) * tl.exp2((edge - top) * unit)
        edge = tl.maximum(edge, _least(row, p * mass, top, unit, vocab, l_token, True, SHIFT, BLOCK))

    # Two logits may be equal after the division by T, so the comparison comes after it.
    edge = tl.maximum(tl.div_rn(edge, scale), tl.div_rn(top, scale) + tl.load(log_min_p + which))
    least = tl.full([BLOCK], float("inf"), tl.float32)
    for start in tl.range(0, vocab, BLOCK, num_stages=4):
        x = _tile(row, start, vocab, l_token, BLOCK)
        least = tl.minimum(least, tl.where((tl.div_rn(x, scale) >= edge) & (x > -float("inf")), x, float("inf")))
    tl.store(out + which * tl.num_programs(0) + node, tl.min(least, 0))


UNUSED_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}
"""Low bits of a logit that are 0 after its conversion to fp32."""


def smallest(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, log_min_p: Tensor) -> Tensor:
    """See naive.py; `log_min_p` is the logarithm of min-p."""
    batch, nodes, vocab = logits.shape
    out = torch.empty(batch, nodes, device=logits.device)
    submit(
        _floor, (nodes, batch),
        logits, temperature, top_k, top_p, log_min_p, out, vocab, *logits.stride(),
        SHIFT=UNUSED_BITS[logits.dtype], BLOCK=BLOCK, num_warps=32,
    )  # fmt: skip
    return out
