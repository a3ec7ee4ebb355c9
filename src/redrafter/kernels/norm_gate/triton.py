"""Residual sums with RMS norms, and the MLP's gate: one kernel each."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from redrafter.kernels.launch import launch, wait_for_previous
from redrafter.kernels.norm_gate.naive import Activation, Norm
from redrafter.kernels.product.triton import summed


@triton.jit
def _normed(x, weight, at, inside, size, offset, eps):
    scale = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32) + offset
    return x * tl.rsqrt(tl.sum(x * x, 0) / size + eps) * scale


@triton.jit(do_not_specialize=["part"])
def _add_norm(
    x, parts, after, before, out, into, size, part, x_row, into_row, after_offset, after_eps, offset, eps,
    PARTS: tl.constexpr, AFTER: tl.constexpr, BEFORE: tl.constexpr, SIZE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_previous(EARLY)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, SIZE)
    inside = at < size
    raw = tl.load(x + row * x_row + at, mask=inside, other=0.0)
    wide = raw.to(tl.float32)
    if PARTS > 0:
        new = summed(parts, row * size + at, inside, part, PARTS)
        if AFTER:
            new = _normed(new, after, at, inside, size, after_offset, after_eps).to(raw.dtype).to(tl.float32)
        sums = (wide + new).to(raw.dtype)
        tl.store(into + row * into_row + at, sums, mask=inside)
        wide = sums.to(tl.float32)
    if BEFORE:
        unit = _normed(wide, before, at, inside, size, offset, eps)
        tl.store(out + row * size + at, unit.to(out.dtype.element_ty), mask=inside)


@triton.jit
def activated(x, SILU: tl.constexpr):
    """SiLU or GELU: x · (1 + tanh(u)) / 2 = x · sigmoid(2·u)."""
    cubic = tl.fma(x * x * x, tl.full(x.shape, 0.044715, tl.float32), x)
    exponent = -x if SILU else -1.5957691216057308 * cubic
    return x / (1 + tl.exp(exponent))


@triton.jit(do_not_specialize=["part"])
def _gate(parts, out, half, part, PARTS: tl.constexpr, SILU: tl.constexpr, TILE: tl.constexpr, EARLY: tl.constexpr):
    wait_for_previous(EARLY)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = at < half
    opening = summed(parts, row * 2 * half + at, inside, part, PARTS)
    what = summed(parts, row * 2 * half + half + at, inside, part, PARTS)
    opening = activated(opening, SILU)
    tl.store(out + row * half + at, (opening * what).to(out.dtype.element_ty), mask=inside)


def add_norm(
    x: Tensor, parts: Tensor | None, after: Norm | None, before: Norm | None, into: Tensor | None = None
) -> Tensor:
    """See naive.py; (n, H) with contiguous rows, parts (S, n, H) contiguous."""
    if parts is None and before is None:
        return x
    rows, size = x.shape
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if before is not None else None
    wide = triton.next_power_of_2(size)
    sums = out if parts is None else into
    assert sums is not None
    first, second = after or Norm(x, 0.0, 0.0), before or Norm(x, 0.0, 0.0)
    launch(
        _add_norm, (rows,), x.device,
        x, x if parts is None else parts, first.weight, second.weight, sums if out is None else out, sums,
        size, rows * size, x.stride(0), sums.stride(0), first.offset, first.eps, second.offset, second.eps,
        PARTS=0 if parts is None else len(parts), AFTER=after is not None, BEFORE=before is not None, SIZE=wide,
        num_warps=max(1, min(16, wide // 512)),
    )  # fmt: skip
    return sums if out is None else out


TILE = 1024


def gate(parts: Tensor, dtype: torch.dtype, activation: Activation = "silu") -> Tensor:
    """See naive.py; (S, n, 2·I), contiguous."""
    count, rows, width = parts.shape
    out = torch.empty(rows, width // 2, dtype=dtype, device=parts.device)
    launch(
        _gate, (rows, triton.cdiv(width // 2, TILE)), parts.device,
        parts, out, width // 2, parts.stride(0), PARTS=count, SILU=activation == "silu", TILE=TILE, num_warps=4,
    )  # fmt: skip
    return out
