"""The random numbers of core/noise.py in Triton, and the hardware's functions to base 2.

core/noise.py is the reference in torch, for the CPU and the oracles; here each program computes the numbers it uses, so
that no noise is read from memory. A drafter's search reads noise from memory, which `made` writes. Change this file and
core/noise.py together: tests/kernels/test_verify.py and test_verify_seeded.py compare them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from redrafter.kernels.launch import submit

GOLDEN = tl.constexpr(-0x61C8864680B583EB)
MIX_1 = tl.constexpr(-0x40A7B892E31B1A47)
MIX_2 = tl.constexpr(-0x6B2FB644ECCEEE15)
LOG2E = tl.constexpr(1.4426950408889634)
ONE_INSTRUCTION = tl.constexpr(not triton.knobs.runtime.interpret)


@triton.jit
def _mix(z):
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * MIX_1
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * MIX_2
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


@triton.jit
def key_of(seed, position, STREAM: tl.constexpr):
    row = _mix(_mix(seed + GOLDEN) + tl.full([], STREAM + 1, tl.int64) * GOLDEN)
    return _mix(row + (position + 1) * GOLDEN)


@triton.jit
def uniform(key, token):
    """In (0, 1): `uniform` of core/noise.py in fp32."""
    bits = (_mix(key + (token.to(tl.int64) + 1) * GOLDEN) >> 11) & 0x1FFFFFFFFFFFFF
    # (bits + 1/2) / 2^53, rounded once whether or not the compiler fuses the two operations
    return tl.minimum(bits.to(tl.float32) * 1.1102230246251565e-16 + 5.551115123125783e-17, 0.999999940395355224609375)


@triton.jit
def exponential(u):
    """-log1p(-u). Triton has no log1p; log(w) · u / (w - 1) with w = 1 - u corrects the rounding of w."""
    w = 1.0 - u
    return tl.where(w == 1.0, u, tl.log(w) * (u / tl.where(w == 1.0, -1.0, w - 1.0)))


@triton.jit
def gumbel(key, token):
    """Standard Gumbel noise: `gumbel` of core/noise.py in fp32."""
    return -tl.log(exponential(uniform(key, token)))


BLOCK = 1024
"""Numbers per program of `made`."""


@triton.jit
def _gumbel(
    seeds, positions, out, count, s_row, p_row, p_place, STREAM: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    part, place, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    at = part * BLOCK + tl.arange(0, BLOCK)
    key = key_of(tl.load(seeds + row * s_row), tl.load(positions + row * p_row + place * p_place), STREAM)
    tl.store(out + (row * tl.num_programs(1) + place) * count + at, gumbel(key, at), mask=at < count)


def made(seeds: Tensor, positions: Tensor, count: int, stream: int) -> Tensor:
    """(B,) seeds, (B, n) positions -> (B, n, count) fp32, as core/noise.py has it."""
    batch, places = positions.shape
    out = torch.empty(batch, places, count, device=seeds.device)
    submit(
        _gumbel, (triton.cdiv(count, BLOCK), places, batch),
        seeds, positions, out, count, seeds.stride(0), *positions.stride(), STREAM=stream, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def power(x):
    """2^x, on a GPU by one instruction, which flushes results below 2^-126 to 0."""
    if ONE_INSTRUCTION:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        return tl.exp2(x)


@triton.jit
def logarithm(x):
    """log2(x), on a GPU by one instruction: absolute error 2^-22 near 1, relative error 2^-22 elsewhere."""
    if ONE_INSTRUCTION:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        return tl.log2(x)


@triton.jit
def gumbel2(u):
    """-log2(-log1p(-u)). Winners have a small u, where `logarithm` of 1 - u is inaccurate: there, a series is used."""
    near = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5 + u * (1 / 6))))))
    return -logarithm(tl.where(u < 0.125, near, logarithm(1.0 - u) * -0.6931471805599453))
