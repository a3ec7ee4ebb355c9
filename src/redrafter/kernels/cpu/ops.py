"""The compiled functions on tensors. `usable` says for which tensors; callers keep torch's way for all others."""

import ctypes

import torch
from torch import Tensor

from redrafter.kernels.cpu.native import library

MOST = 16
"""Rows of x that a product takes; beyond, torch's own products are better."""


def available() -> bool:
    return library() is not None


def usable(x: Tensor) -> bool:
    """Few rows of contiguous fp32 on the CPU, no gradient wanted."""
    return (
        x.dtype is torch.float32
        and x.is_contiguous()
        and 0 < x.numel() <= MOST * x.shape[-1]
        and x.device.type == "cpu"
        and not torch.is_grad_enabled()
    )


def readable(*weights: Tensor) -> bool:
    """Matrices as the compiled products read them. (The same for all that a module holds, so one call.)"""
    return all(w.dtype is torch.float32 and w.is_contiguous() and w.device.type == "cpu" for w in weights)


def normable(x: Tensor) -> bool:
    """As `usable`, with more rows: a norm of heads has one for each of them."""
    return (
        x.dtype is torch.float32
        and x.is_contiguous()
        and 0 < x.numel() <= 1 << 16
        and x.device.type == "cpu"
        and not torch.is_grad_enabled()
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., in), weight (out, in) -> (..., out)."""
    size, out = weight.shape[1], weight.shape[0]
    y = x.new_empty(*x.shape[:-1], out)
    _lib().linear(_at(x), _at(weight), _at(bias), _at(y), x.numel() // size, size, out, torch.get_num_threads())
    return y


def linear_int8(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same with int8 weights and one fp32 scale for each of their rows."""
    size, out = weight.shape[1], weight.shape[0]
    y = x.new_empty(*x.shape[:-1], out)
    _lib().linear_int8(
        _at(x), _at(weight), _at(scale), _at(bias), _at(y), x.numel() // size, size, out, torch.get_num_threads()
    )
    return y


def linear3(x: Tensor, each: list[tuple[Tensor, Tensor | None]]) -> list[Tensor]:
    """Three products (weight, bias) of one x at once."""
    size = x.shape[-1]
    made = [x.new_empty(*x.shape[:-1], w.shape[0]) for w, _ in each]
    (w0, b0), (w1, b1), (w2, b2) = each
    y0, y1, y2 = made
    _lib().linear3(
        *(_at(x), _at(w0), _at(b0), _at(y0), len(w0)),
        *(_at(w1), _at(b1), _at(y1), len(w1)),
        *(_at(w2), _at(b2), _at(y2), len(w2)),
        *(x.numel() // size, size, torch.get_num_threads()),
    )
    return made


def gated(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """down(silu(gate(x)) · up(x))."""
    middle, size = gate.shape
    n = x.numel() // size
    inner, y = x.new_empty(n, middle), torch.empty_like(x)
    _lib().gated(_at(x), _at(gate), _at(up), _at(down), _at(inner), _at(y), n, size, middle, torch.get_num_threads())
    return y


def rms_norm(x: Tensor, weight: Tensor, offset: float, eps: float) -> Tensor:
    """x / rms(x) · (weight + offset)."""
    y = torch.empty_like(x)
    size = x.shape[-1]
    _lib().rms_norm(_at(x), _at(weight), offset, eps, _at(y), x.numel() // size, size)
    return y


def rotate_and_store(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, keys: Tensor, values: Tensor
) -> None:
    """Rotate q (B, n, H·D) in place; put rotated k and plain v (B, n, K·D) into slots (B, n) of (B, K, S, D)."""
    batch, n = slots.shape
    kv_heads, size = keys.shape[1], keys.shape[3]
    heads = q.shape[-1] // size
    _lib().rotate_and_store(
        *(_at(x) for x in (q, k, v, cos, sin, slots, keys, values)),
        *(keys.stride(0), keys.stride(1), batch, n, heads, kv_heads, size),
    )


def move_path(cache: Tensor, lengths: Tensor, path: Tensor) -> None:
    """Move nodes `path` (B, steps) of the tree behind `lengths` (B,) to the slots right after; cache (B, K, S, D)."""
    batch, heads, _, size = cache.shape
    each = cache.element_size()
    _lib().move_path(
        *(_at(cache), _at(lengths), _at(path), batch, heads, path.shape[1]),
        *(cache.stride(0) * each, cache.stride(1) * each, size * each),
    )


def movable(cache: Tensor, lengths: Tensor, path: Tensor) -> bool:
    return (
        cache.device.type == lengths.device.type == path.device.type == "cpu"
        and cache.is_contiguous()
        and lengths.is_contiguous()
        and path.is_contiguous()
        and available()
    )


def attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """q (B, H, n, D), keys and values (B, K, S, D), additive mask (B, 1, n, S) -> (B, n, H, D)."""
    batch, heads, n, size = q.shape
    slots = keys.shape[2]
    out = q.new_empty(batch, n, heads, size)
    _lib().attend(
        *(_at(q), *q.stride()[:3]),
        *(_at(keys), *keys.stride()[:2]),
        *(_at(values), *values.stride()[:2]),
        *(_at(mask), mask.stride(0), mask.stride(2)),
        *(_at(out), batch, heads, keys.shape[1], n, slots, size, scale, torch.get_num_threads()),
    )
    return out


def attendable(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> bool:
    """Few queries in fp32, keys whose slots follow one another, one mask for all heads."""
    return (
        mask is not None
        and mask.dtype is q.dtype is keys.dtype is torch.float32
        and q.shape[0] * q.shape[2] <= MOST
        and mask.dim() == 4
        and mask.shape[1] == 1
        and mask.shape[0] == q.shape[0]
        and mask.shape[2:] == (q.shape[2], keys.shape[2])
        and q.shape[3] == keys.shape[3] == values.shape[3]
        and q.shape[1] % keys.shape[1] == 0
        and q.stride(3) == keys.stride(3) == values.stride(3) == mask.stride(3) == 1
        and keys.stride(2) == values.stride(2) == keys.shape[3]
        and q.device.type == "cpu"
        and not torch.is_grad_enabled()
    )


def _lib() -> ctypes.CDLL:
    lib = library()
    assert lib is not None
    return lib


def _at(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
