"""A product whose program computes the same columns of both halves, and gates one with the other."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from redrafter.kernels.launch import launch, wait_for_previous
from redrafter.kernels.norm_gate.naive import Activation
from redrafter.kernels.norm_gate.triton import activated, gate
from redrafter.kernels.product.naive import PROGRAMS, parts_of
from redrafter.kernels.product.triton import RESERVED, library_agrees, product, shared_memory

WIDE = 64
"""Columns of each half."""


@triton.jit(do_not_specialize=["n"])
def _gated_product(
    weights, x, bias, out, n, half, size,
    BIAS: tl.constexpr, SILU: tl.constexpr, WIDE: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """WIDE gated outputs of TOKENS tokens. Each half is summed and rounded as `product` does."""
    wait_for_previous(EARLY)
    tile, wide = tl.program_id(0), tl.program_id(1)
    opening, what = tl.zeros([WIDE, TOKENS], tl.float32), tl.zeros([WIDE, TOKENS], tl.float32)
    for k in range(0, size, BLOCK):  # behind the last column, loads give zeros
        tokens = x.load([tile * TOKENS, k]).T
        opening = tl.dot(weights.load([wide * WIDE, k]), tokens, opening)
        what = tl.dot(weights.load([half + wide * WIDE, k]), tokens, what)
    column, row = wide * WIDE + tl.arange(0, WIDE), tile * TOKENS + tl.arange(0, TOKENS)
    if BIAS:
        opening += tl.load(bias + column, mask=column < half, other=0.0).to(tl.float32)[:, None]
        what += tl.load(bias + half + column, mask=column < half, other=0.0).to(tl.float32)[:, None]
    dtype = out.dtype.element_ty
    gated = activated(opening.to(dtype).to(tl.float32), SILU) * what.to(dtype).to(tl.float32)
    into = out + row[None, :].to(tl.int64) * half + column[:, None]
    tl.store(into, gated.to(dtype), mask=(row < n)[None, :] & (column < half)[:, None])


TILES = {16: (128, 4), 32: (128, 5), 64: (128, 4), 128: (64, 3)}
"""By the tokens of a tile: the terms that are read at once, and how many reads are under way."""
FEW = (64, 4)
"""The same for 16 tokens, if there are fewer than 1.5 programs per multiprocessor. These tiles leave shared memory for
a second program there."""


def plan(n: int, half: int, memory: int = 227 << 10) -> dict[str, Any]:
    """Launch parameters, the fastest of a dozen on an H200. None of them changes a bit."""
    tokens = min(max(16, triton.next_power_of_2(n)), 128)
    block, stages = FEW if tokens == 16 and triton.cdiv(half, WIDE) < 1.5 * PROGRAMS else TILES[tokens]
    stages = max(1, min(stages, (memory - RESERVED) // ((2 * WIDE + tokens) * block * 2)))
    return {"TOKENS": tokens, "BLOCK": block, "num_warps": 4, "num_stages": stages}


def gated_product(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Activation = "silu") -> Tensor:
    """See naive.py; 16-bit floats whose last axes are contiguous."""
    (n, size), half = x.shape, weight.shape[0] // 2
    if parts_of(weight) > 1 or library_agrees(n, weight, bias is not None):
        return gate(product(x, weight, bias), x.dtype, activation)
    shared = plan(n, half, shared_memory(x.device))
    x = x.contiguous()
    out = torch.empty(n, half, dtype=x.dtype, device=x.device)
    of_weights = TensorDescriptor(weight, [2 * half, size], [weight.stride(0), 1], [WIDE, shared["BLOCK"]])
    of_tokens = TensorDescriptor(x, [n, size], [size, 1], [shared["TOKENS"], shared["BLOCK"]])
    launch(
        _gated_product, (triton.cdiv(n, shared["TOKENS"]), triton.cdiv(half, WIDE)), x.device,
        of_weights, of_tokens, weight if bias is None else bias, out, n, half, size,
        BIAS=bias is not None, SILU=activation == "silu", WIDE=WIDE, **shared,
    )  # fmt: skip
    return out
