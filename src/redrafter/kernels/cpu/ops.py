"""The C++ functions on tensors, and predicates that say which tensors they take. Callers use torch for all others."""

import torch
from torch import Tensor

from redrafter.kernels import runs_cpp
from redrafter.kernels.cpu.library import library, loaded, require_done
from redrafter.kernels.threads import thread_count

MOST = 16
"""Most rows of x that a product takes; for more rows torch's own products are faster."""
NUMBER_BYTES = 4
"""Of fp32."""
LANES = 16
"""Numbers of a vector in C++; attention takes heads of a multiple of them."""
MOST_NORMED = 1 << 16
"""Most values that a norm takes; a norm of heads has one row per head, more than a product has."""


def available() -> bool:
    """Whether the C++ could be compiled and loaded on this machine."""
    return library() is not None


def usable(x: Tensor) -> bool:
    """Whether products take x: few contiguous fp32 rows, no gradient."""
    return (
        x.dtype is torch.float32
        and x.is_contiguous()
        and 0 < x.numel() <= MOST * x.shape[-1]
        and runs_cpp(x.device)
        and not torch.is_grad_enabled()
    )


def readable(*weights: Tensor | None) -> bool:
    """Whether products take these weights, all of one module: contiguous fp32.

    Tensors of a safetensors file lie in memory as in the file, which may be at any byte: torch copes with that.
    """
    return all(
        w.dtype is torch.float32 and w.is_contiguous() and w.data_ptr() % NUMBER_BYTES == 0 and runs_cpp(w.device)
        for w in weights
        if w is not None
    )


def normable(x: Tensor) -> bool:
    """Whether a norm takes x: as `usable`, with more rows."""
    return (
        x.dtype is torch.float32
        and x.is_contiguous()
        and 0 < x.numel() <= MOST_NORMED
        and runs_cpp(x.device)
        and not torch.is_grad_enabled()
    )


def _require_rows_of(size: int, x: Tensor) -> None:
    """C++ takes sizes from the weights, and would read and write behind rows of another size."""
    if x.shape[-1] != size:
        raise ValueError(f"rows of {x.shape[-1]} numbers for a weight that reads {size}")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., in), weight (out, in) -> (..., out)."""
    size, out = weight.shape[1], weight.shape[0]
    _require_rows_of(size, x)
    y = x.new_empty(*x.shape[:-1], out)
    loaded().linear(_at(x), _at(weight), _at(bias), _at(y), x.numel() // size, size, out, thread_count())
    return y


def linear3(x: Tensor, each: list[tuple[Tensor, Tensor | None]]) -> list[Tensor]:
    """Three products of one x, by (weight, bias), in one call."""
    size = x.shape[-1]
    for w, _ in each:
        _require_rows_of(w.shape[1], x)
    made = [x.new_empty(*x.shape[:-1], w.shape[0]) for w, _ in each]
    (w0, b0), (w1, b1), (w2, b2) = each
    y0, y1, y2 = made
    loaded().linear3(
        *(_at(x), _at(w0), _at(b0), _at(y0), len(w0)),
        *(_at(w1), _at(b1), _at(y1), len(w1)),
        *(_at(w2), _at(b2), _at(y2), len(w2)),
        *(x.numel() // size, size, thread_count()),
    )
    return made


def gated(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """down(silu(gate(x)) · up(x))."""
    middle, size = gate.shape
    _require_rows_of(size, x)
    if up.shape != gate.shape or down.shape != (size, middle):
        raise ValueError(f"gated products of weights of the shapes {gate.shape}, {up.shape} and {down.shape}")
    n = x.numel() // size
    y = torch.empty_like(x)
    loaded().gated(_at(x), _at(gate), _at(up), _at(down), _at(y), n, size, middle, thread_count())
    return y


def rms_norm(x: Tensor, weight: Tensor, offset: float, eps: float) -> Tensor:
    """x / rms(x) · (weight + offset)."""
    y = torch.empty_like(x)
    size = x.shape[-1]
    loaded().norm(_at(x), _at(weight), offset, eps, _at(y), x.numel() // size, size)
    return y


def rotate_and_store(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, keys: Tensor, values: Tensor
) -> None:
    """Rotate q (B, n, H·D) in place; write rotated k and plain v (B, n, K·D) to slots (B, n) of (B, K, S, D)."""
    batch, n = slots.shape
    kv_heads, size = keys.shape[1], keys.shape[3]
    heads = q.shape[-1] // size
    done = loaded().rotate_and_store(
        *(_at(x) for x in (q, k, v, cos, sin, slots, keys, values)),
        *(keys.shape[2], keys.stride(0), keys.stride(1), batch, n, heads, kv_heads, size),
    )
    require_done(done)


def move_path(cache: Tensor, lengths: Tensor, path: Tensor) -> None:
    """Move nodes `path` (B, steps) of the tree at slot `lengths` (B,) to that slot and on.

    `cache` is (B, K, S, D), or several of these with equal distances, (parts, B, K, S, D).
    """
    parts = cache if cache.dim() == 5 else cache[None]
    count, batch, heads, slots, size = parts.shape
    part_step, row_step, head_step = (step * cache.element_size() for step in parts.stride()[:3])
    done = loaded().move_path(
        *(_at(cache), _at(lengths), _at(path), count, part_step, batch, heads, slots, path.shape[1]),
        *(row_step, head_step, size * cache.element_size()),
    )
    require_done(done)


def uniform(keys: Tensor, count: int) -> Tensor:
    """Keys (...) -> (..., count) numbers in (0, 1) in fp32: `core.noise.uniform` behind its keys."""
    keys, y = keys.contiguous(), torch.empty(*keys.shape, count)
    most = 1 - torch.finfo(torch.float32).eps / 2
    loaded().uniform(_at(keys), _at(y), keys.numel(), count, most)
    return y


def gumbel(keys: Tensor, count: int) -> Tensor:
    """Keys (...) -> (..., count) Gumbel noise in fp32: `core.noise.gumbel` behind its keys."""
    keys, y = keys.contiguous(), torch.empty(*keys.shape, count)
    most = 1 - torch.finfo(torch.float32).eps / 2
    loaded().gumbel(_at(keys), _at(y), keys.numel(), count, most, thread_count())
    return y


def attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """q (B, n, H, D), keys and values (B, K, S, D), mask (B, 1, n, S), 0 at visible slots -> (B, n, H, D)."""
    batch, n, heads, size = q.shape
    out = torch.empty_like(q)
    loaded().attention(
        *(_at(q), _at(keys), _at(values), *keys.stride()[:2]),
        *(_at(mask), mask.stride(0), mask.stride(2)),
        *(_at(out), batch, heads, keys.shape[1], n, keys.shape[2], size, scale, thread_count()),
    )
    return out


def attendable(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> bool:
    """Whether `attend` takes these: few fp32 queries, keys with adjacent slots, one mask for all heads."""
    return (
        mask is not None
        and mask.dtype is q.dtype is keys.dtype is torch.float32
        and q.shape[0] * q.shape[1] <= MOST
        and mask.shape == (q.shape[0], 1, q.shape[1], keys.shape[2])
        and q.shape[3] == keys.shape[3] == values.shape[3]
        and q.shape[3] % LANES == 0
        and q.shape[2] % keys.shape[1] == 0
        and q.is_contiguous()
        and keys.stride() == values.stride()
        and keys.stride()[2:] == (keys.shape[3], 1)
        and mask.stride(3) == 1
        and runs_cpp(q.device)
        and not torch.is_grad_enabled()
    )


def _at(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
