"""A product whose rows have the same bits in every pass.

The weights are on the wide side of a tile and the tokens on the narrow one. A tensor core adds 16 terms at a time, in
the order of K, whatever the tile. So a row's bits depend on the number of parts alone, and the tile may follow the
number of tokens.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from redrafter.kernels import compiles_only
from redrafter.kernels.launch import launch, wait_for_previous
from redrafter.kernels.product import naive
from redrafter.kernels.product.naive import BLOCK, PROGRAMS, parts_of


@triton.jit(do_not_specialize=["n"])
def _product(
    weights, x, bias, out, n, width, size, out_part, out_row,
    BIAS: tl.constexpr, PARTS: tl.constexpr, WIDE: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One tile of one part: WIDE outputs of TOKENS tokens."""
    tile, wide, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)  # tiles of the same weights run together
    each = size // PARTS
    wait_for_previous(EARLY)
    acc = tl.zeros([WIDE, TOKENS], tl.float32)
    for k in range(part * each, (part + 1) * each, BLOCK):  # behind the last column, loads give zeros
        acc = tl.dot(weights.load([wide * WIDE, k]), x.load([tile * TOKENS, k]).T, acc)
    column, row = wide * WIDE + tl.arange(0, WIDE), tile * TOKENS + tl.arange(0, TOKENS)
    if BIAS and part == 0:
        acc += tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)[:, None]
    into = out + part.to(tl.int64) * out_part + row[None, :].to(tl.int64) * out_row + column[:, None]
    tl.store(into, acc.to(out.dtype.element_ty), mask=(row < n)[None, :] & (column < width)[:, None])


@triton.jit
def summed(parts, at, inside, part, PARTS: tl.constexpr):
    """For the kernels that read a product: the sum of the partial sums at `at`, first to last."""
    whole = tl.load(parts + at, mask=inside, other=0.0).to(tl.float32)
    for i in tl.static_range(1, PARTS):  # unrolled, so that all loads are issued at once
        whole += tl.load(parts + i * part + at, mask=inside, other=0.0).to(tl.float32)
    return whole


RESERVED = 2048
"""Bytes of shared memory that a program needs besides its tiles."""


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may have; on a CPU, in Triton's interpreter, as many as on an H200."""
    if device.type != "cuda":
        return 227 << 10
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)


def plan(n: int, width: int, parts: int, memory: int = 227 << 10) -> dict[str, Any]:
    """Launch parameters, by measurement on an H200: the wide tile unless the narrow one leaves fewer programs idle.

    None of them changes a bit. As many tiles are read ahead as fit the shared memory (bytes).
    """
    tokens = min(max(16, triton.next_power_of_2(n)), 128)

    def busy(wide: int) -> float:
        tiles = triton.cdiv(width, wide) * parts * triton.cdiv(n, tokens)
        return float(tiles / (triton.cdiv(tiles, PROGRAMS) * PROGRAMS))

    wide = 64 if busy(64) > busy(128) and n <= 128 else 128
    block, stages = (64, 8 if wide == 64 else 6) if tokens == 128 else (BLOCK, 5 if wide == 64 else 4)
    stages = max(1, min(stages, (memory - RESERVED) // ((wide + tokens) * block * 2)))
    return {"WIDE": wide, "TOKENS": tokens, "BLOCK": block, "num_warps": 4, "num_stages": stages}


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See naive.py; 16-bit floats whose last axes are contiguous."""
    if library_agrees(len(x), weight, bias is not None):
        return naive.product(x, weight, bias)
    return own_product(x, weight, bias)


def own_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The kernel's product, for any number of tokens."""
    (n, size), width = x.shape, weight.shape[0]
    parts = parts_of(weight)
    shared = plan(n, width, parts, shared_memory(x.device))
    x = x.contiguous()
    out = torch.empty(parts, n, width, dtype=x.dtype if parts == 1 else torch.float32, device=x.device)
    of_weights = TensorDescriptor(weight, [width, size], [weight.stride(0), 1], [shared["WIDE"], shared["BLOCK"]])
    of_tokens = TensorDescriptor(x, [n, size], [size, 1], [shared["TOKENS"], shared["BLOCK"]])
    grid = triton.cdiv(n, shared["TOKENS"]), triton.cdiv(width, shared["WIDE"]), parts
    launch(
        _product, grid, x.device,
        of_weights, of_tokens, weight if bias is None else bias, out, n, width, size, out.stride(0), out.stride(1),
        BIAS=bias is not None, PARTS=parts, **shared,
    )  # fmt: skip
    return out


MANY = (256, 384, 512, 640, 768, 1024, 2048)
"""Numbers of tokens for which the library is tried: its product is then a few percent faster than the kernel's."""
_agreed: dict[tuple[Any, ...], bool] = {}


def library_agrees(n: int, weight: Tensor, biased: bool) -> bool:
    """Whether the library's product of n tokens gives the kernel's bits: tried at the first use of the shape."""
    if n not in MANY or not weight.is_cuda:
        return False
    key = (n, *weight.shape, weight.dtype, weight.device, biased)
    if key not in _agreed:
        if compiles_only() or torch.cuda.is_current_stream_capturing():  # the pass before a recording has compared
            return False
        random = torch.Generator(weight.device).manual_seed(0)  # a user's random numbers stay as they are
        like = {"dtype": weight.dtype, "device": weight.device, "generator": random}
        x, bias = torch.randn(n, weight.shape[1], **like), torch.randn(len(weight), **like) if biased else None
        _agreed[key] = torch.equal(naive.product(x, weight, bias), own_product(x, weight, bias))
    return _agreed[key]
