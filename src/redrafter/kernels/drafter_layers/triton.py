"""The recurrent drafter's layers, one kernel each: with few rows a product takes less time than a launch.

The norm of a row is a factor, so it is applied after the product: the kernel sums the squares while it multiplies, and
scales the result at the end. Each warp sums its own part of a row; the parts are added at the end, so warps do not wait
for each other in between.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from redrafter.kernels.launch import launch, wait_for_previous

EPSILON = torch.finfo(torch.float32).eps
"""The default epsilon of F.rms_norm in fp32."""


@triton.jit
def _load(x, rows, row, real, k, inside):
    """(ROWS,) of x at (STREAMS, K) -> (STREAMS, ROWS, K)."""
    at = rows[None, :, None] * row + k[:, None, :]
    return tl.load(x + at, mask=real[None, :, None] & inside[:, None, :], other=0.0)


@triton.jit
def _sum(
    acc, x, w, rows, size, x_row, w_row, real, col, cols,
    M: tl.constexpr, STREAMS: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr, SQUARES: tl.constexpr,
):  # fmt: skip
    """acc + x wᵀ, and each row's sum of squares if SQUARES; each warp has its own columns of both."""
    squares = tl.zeros([STREAMS, M], tl.float32)
    for start in range(0, size, STREAMS * K):
        k = start + tl.arange(0, STREAMS)[:, None] * K + tl.arange(0, K)[None, :]
        inside = k < size
        a = _load(x, rows, x_row, real, k, inside)
        b = _load(w, col, w_row, cols, k, inside)
        acc = tl.dot(a, tl.permute(b, (0, 2, 1)), acc, input_precision=PRECISION)
        if SQUARES:
            wide = a.to(tl.float32)
            squares += tl.sum(wide * wide, 2)
    return acc, squares


@triton.jit
def _layer(
    x, w, bias, share, extra, w_extra, out, count, width, size, extra_size, per_share, x_row, w_row, e_row, we_row, eps,
    NORMED: tl.constexpr, RESIDUAL: tl.constexpr, SHARED: tl.constexpr, EXTRA: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, STREAMS: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """N columns of a residual block or of the input layer."""
    wait_for_previous(EARLY)
    rows, col = tl.arange(0, M), tl.program_id(0) * N + tl.arange(0, N)
    real, cols = rows < count, col < width
    here = real[:, None] & cols[None, :]
    # Loaded now, used at the end: the loads overlap with the product.
    if SHARED:
        given = tl.load(share + (rows // per_share)[:, None] * width + col[None, :], mask=here, other=0.0)
    if RESIDUAL:
        by = tl.load(bias + col, mask=cols, other=0.0).to(tl.float32)
        before = tl.load(x + rows[:, None] * x_row + col[None, :], mask=here, other=0.0)
    acc = tl.zeros([STREAMS, M, N], tl.float32)
    acc, squares = _sum(acc, x, w, rows, size, x_row, w_row, real, col, cols, M, STREAMS, K, PRECISION, NORMED)
    if EXTRA:
        acc, _ = _sum(
            acc, extra, w_extra, rows, extra_size, e_row, we_row, real, col, cols, M, STREAMS, K, PRECISION, False
        )
    made = tl.sum(acc, 0)
    if NORMED:
        made = made * tl.rsqrt(tl.sum(squares, 0) / size + eps)[:, None]
    if SHARED:
        made += given.to(tl.float32)
    if RESIDUAL:
        made += by[None, :]
        made = made / (1 + tl.exp(-made))
        made += before.to(tl.float32)
    tl.store(out + rows[:, None] * width + col[None, :], made.to(out.dtype.element_ty), mask=here)


@triton.jit
def _cell(
    x, w, bias, heard, parents, tokens, places, out, count, width, old_width, size, x_row, w_row, h_row,
    PICKS: tl.constexpr, GATED: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, STREAMS: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """N columns of the next state."""
    wait_for_previous(EARLY)
    rows, col = tl.arange(0, M), tl.program_id(0) * N + tl.arange(0, N)
    real, cols = rows < count, col < size
    here = real[:, None] & cols[None, :]
    into, said = rows, rows.to(tl.int64)
    if PICKS:
        rows = rows // width * old_width + tl.load(parents + rows, mask=real, other=0).to(tl.int32)
        said = tl.load(places + tl.load(tokens + into, mask=real, other=0))
    by = tl.load(bias + col, mask=cols, other=0.0).to(tl.float32)
    given = tl.load(heard + said[:, None] * h_row + col[None, :], mask=here, other=0.0)
    if GATED:
        gate_by = tl.load(bias + size + col, mask=cols, other=0.0).to(tl.float32)
        gate_given = tl.load(heard + said[:, None] * h_row + size + col[None, :], mask=here, other=0.0)
        old = tl.load(x + rows[:, None] * x_row + col[None, :], mask=here, other=0.0).to(tl.float32)
    each, gates = tl.zeros([STREAMS, M, N], tl.float32), tl.zeros([STREAMS, M, N], tl.float32)
    for start in range(0, size, STREAMS * K):
        k = start + tl.arange(0, STREAMS)[:, None] * K + tl.arange(0, K)[None, :]
        inside = k < size
        a = _load(x, rows, x_row, real, k, inside)
        b = _load(w, col, w_row, cols, k, inside)
        each = tl.dot(a, tl.permute(b, (0, 2, 1)), each, input_precision=PRECISION)
        if GATED:
            b = _load(w + size * w_row, col, w_row, cols, k, inside)
            gates = tl.dot(a, tl.permute(b, (0, 2, 1)), gates, input_precision=PRECISION)
    new = tl.sum(each, 0) + by[None, :] + given.to(tl.float32)
    new = new / (1 + tl.exp(-new))
    if GATED:
        gate = tl.sum(gates, 0) + gate_by[None, :] + gate_given.to(tl.float32)
        gate = 1 / (1 + tl.exp(-gate))
        new = old + gate * (new - old)
    tl.store(out + into[:, None] * size + col[None, :], new.to(out.dtype.element_ty), mask=here)


@triton.jit
def _read(
    query, memory, out, width, heads, size, q_row, q_beam, m_row, m_head,
    W: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The memory readings of all beams, for one head of one row."""
    wait_for_previous(EARLY)
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    beam, d = tl.arange(0, W), tl.arange(0, D)
    here = (beam < width)[:, None] & (d < size)[None, :]
    q = tl.load(query + row * q_row + beam[:, None] * q_beam + head * size + d[None, :], mask=here, other=0.0)
    q = q.to(tl.float32)
    q = q / tl.maximum(tl.sqrt(tl.sum(q * q, 1)), 1e-12)[:, None]
    square = (d < size)[:, None] & (d < size)[None, :]
    m = tl.load(memory + row * m_row + head * m_head + d[:, None] * size + d[None, :], mask=square, other=0.0)
    found = tl.dot(q, m, input_precision=PRECISION)
    found = found * tl.rsqrt(tl.sum(found * found, 1) / size + 1)[:, None]
    into = out + (row * width + beam)[:, None] * (heads * size) + head * size + d[None, :]
    tl.store(into, found.to(out.dtype.element_ty), mask=here)


@triton.jit
def _head(
    weights, x, scales, x_scales, out, count, vocab, size,
    WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Logits of WIDE tokens for all rows. Sums of integers are exact, so tiles may have any size."""
    wait_for_previous(EARLY)
    first = tl.program_id(0) * WIDE
    acc = tl.zeros([WIDE, ROWS], tl.int32)
    for k in range(0, size, BLOCK):  # behind the last column, loads give zeros
        acc = tl.dot(weights.load([first, k]), x.load([0, k]).T, acc, out_dtype=tl.int32)
    token, row = first + tl.arange(0, WIDE), tl.arange(0, ROWS)
    logits = acc.to(tl.float32) * tl.load(scales + token, mask=token < vocab, other=0.0)[:, None]
    logits *= tl.load(x_scales + row, mask=row < count, other=0.0)[None, :]
    into = out + row[None, :].to(tl.int64) * vocab + token[:, None]
    tl.store(into, logits.to(out.dtype.element_ty), mask=(row < count)[None, :] & (token < vocab)[:, None])


def _tiles(x: Tensor, columns: int, gated: bool = False) -> dict[str, object]:
    """Sixteen columns per program: about a hundred programs, one per multiprocessor, for a layer of two thousand.

    Each iteration of a program's loop waits for memory, so iterations are few and prefetched.
    """
    full = x.dtype == torch.float32
    m = max(16, triton.next_power_of_2(x.numel() // x.shape[-1]))
    return {
        "M": m,
        "N": 16 if columns <= 4096 else 32,
        "STREAMS": 4,
        "K": 16 if full or m > 16 else 128 if gated and columns <= 4096 else 32,
        "PRECISION": "ieee" if full else "tf32",
        "num_warps": 4,
        "num_stages": 2 if full else 3 if gated else 5,
    }


def block(x: Tensor, weight: Tensor, bias: Tensor, normed: bool) -> Tensor:
    out = torch.empty_like(x)
    count, n = x.numel() // x.shape[-1], x.shape[-1]
    tiles = _tiles(x, n)
    launch(
        _layer, (triton.cdiv(n, tiles["N"]),), x.device,
        x, weight, bias, x, x, weight, out, count, n, n, 0, 1, n, weight.stride(0), n, weight.stride(0),
        EPSILON, NORMED=normed, RESIDUAL=True, SHARED=False, EXTRA=False, **tiles,
    )  # fmt: skip
    return out


def joint(state: Tensor, weight: Tensor, share: Tensor, reading: Tensor | None, columns: Tensor | None) -> Tensor:
    batch, beams, size = state.shape
    n = weight.shape[0]
    out = state.new_empty(batch, beams, n)
    tiles = _tiles(state, n)
    more, w = (state, weight) if reading is None or columns is None else (reading, columns)
    launch(
        _layer, (triton.cdiv(n, tiles["N"]),), state.device,
        state, weight, share, share, more, w, out, batch * beams, n, size, more.shape[-1], beams,
        size, weight.stride(0), more.shape[-1], w.stride(0), 0.0,
        NORMED=False, RESIDUAL=False, SHARED=True, EXTRA=reading is not None, **tiles,
    )  # fmt: skip
    return out


def cell(
    state: Tensor, weight: Tensor, bias: Tensor, heard: Tensor, parents: Tensor | None = None,
    tokens: Tensor | None = None, places: Tensor | None = None,
) -> Tensor:  # fmt: skip
    size = state.shape[-1]
    out = state.new_empty(*(state.shape[:-1] if parents is None else parents.shape), size)
    tiles = _tiles(out, size, gated=True)
    launch(
        _cell, (triton.cdiv(size, tiles["N"]),), state.device,
        state, weight, bias, heard, parents, tokens, places, out, out.numel() // size,
        out.shape[-2], state.shape[-2], size, size, weight.stride(0), heard.shape[-1],
        PICKS=parents is not None, GATED=weight.shape[0] != size, **tiles,
    )  # fmt: skip
    return out


def read(query: Tensor, memory: Tensor) -> Tensor:
    batch, beams, _ = query.shape
    heads, size = memory.shape[1:3]
    out = torch.empty_like(query)
    launch(
        _read, (heads, batch), query.device,
        query, memory, out, beams, heads, size, query.stride(0), query.stride(1), memory.stride(0), memory.stride(1),
        W=max(16, triton.next_power_of_2(beams)), D=max(16, triton.next_power_of_2(size)),
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",  # more precise than the result's dtype
        num_warps=4,
    )  # fmt: skip
    return out


def head(x: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    vocab, size = weight.shape
    rows = x.reshape(-1, size)
    count = len(rows)
    m = max(16, triton.next_power_of_2(count))
    wide, deep = 128, 128
    out = torch.empty(*x.shape[:-1], vocab, dtype=dtype, device=x.device)
    launch(
        _head, (triton.cdiv(vocab, wide),), x.device,
        TensorDescriptor(weight, [vocab, size], [size, 1], [wide, deep]),
        TensorDescriptor(rows, [count, size], [size, 1], [m, deep]),
        scale, x_scale, out, count, vocab, size,
        WIDE=wide, ROWS=m, BLOCK=deep, num_warps=4, num_stages=5,
    )  # fmt: skip
    return out
