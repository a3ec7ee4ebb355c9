"""RMS norm and the MLP's gate, one kernel each."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _norm(
    x, parts, weight, out, into, size, part, x_row, into_row, offset, eps, PARTS: tl.constexpr, SIZE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, SIZE)
    inside = at < size
    raw = tl.load(x + row * x_row + at, mask=inside, other=0.0)
    scale = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32) + offset
    wide = raw.to(tl.float32)
    if PARTS > 0:
        for i in tl.static_range(PARTS):  # unrolled, so that all loads are issued at once
            wide += tl.load(parts + i * part + row * size + at, mask=inside, other=0.0).to(tl.float32)
        raw = wide.to(raw.dtype)
        tl.store(into + row * into_row + at, raw, mask=inside)
        wide = raw.to(tl.float32)
    unit = wide * tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    tl.store(out + row * size + at, (unit * scale).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gate(joint, out, half, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = at < half
    opening = tl.load(joint + row * 2 * half + at, mask=inside, other=0.0).to(tl.float32)
    what = tl.load(joint + row * 2 * half + half + at, mask=inside, other=0.0).to(tl.float32)
    opening = opening / (1 + tl.exp(-opening))
    tl.store(out + row * half + at, (opening * what).to(out.dtype.element_ty), mask=inside)


def norm(
    x: Tensor, weight: Tensor, offset: float, eps: float, parts: Tensor | None = None, into: Tensor | None = None
) -> Tensor:
    """See naive.py; (n, H) with contiguous rows, parts (S, n, H) contiguous."""
    rows, size = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    wide = triton.next_power_of_2(size)
    sums = out if parts is None else into
    assert sums is not None
    _norm[(rows,)](
        x, x if parts is None else parts, weight, out, sums, size, rows * size, x.stride(0), sums.stride(0),
        offset, eps, PARTS=0 if parts is None else len(parts), SIZE=wide, num_warps=max(1, min(16, wide // 512)),
    )  # fmt: skip
    return out


TILE = 1024


def gate(joint: Tensor) -> Tensor:
    """See naive.py; (n, 2·I), contiguous."""
    rows, half = joint.shape[0], joint.shape[1] // 2
    out = joint.new_empty(rows, half)
    _gate[rows, triton.cdiv(half, TILE)](joint, out, half, TILE=TILE, num_warps=4)
    return out
