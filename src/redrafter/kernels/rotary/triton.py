"""Head norms, rotation and the write to the KV cache in one kernel."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from redrafter.kernels.launch import launch, wait_for_previous
from redrafter.kernels.product.triton import summed
from redrafter.kernels.rotary.naive import Heads
from redrafter.kernels.tree_attention.triton_lines import COLUMNS, PLACE, SLOT


@triton.jit(do_not_specialize=["part"])
def _rotate(
    parts, cos, sin, q_scales, k_scales, query, keys, values, lines,
    part, p_row, a_row, c_row, c_head, c_slot,
    heads, kv_heads, size, turned, offset, eps,
    PARTS: tl.constexpr, NORM: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, Q: tl.constexpr, K: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """HEADS heads of one token. NORM: 0 without head norms, 1 with a norm of each head, 2 with one of all heads."""
    wait_for_previous(EARLY)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, D)
    half = turned // 2
    across = tl.where(d < half, d + half, tl.where(d < turned, d - half, d))
    inside = (head < heads + 2 * kv_heads)[:, None] & (d < size)[None, :]
    is_query, is_value = head < heads, head >= heads + kv_heads
    start = token * p_row + head[:, None] * size
    own = summed(parts, start + d[None, :], inside, part, PARTS)
    other = summed(parts, start + across[None, :], inside, part, PARTS)
    plain = own
    if NORM > 0:
        if NORM == 1:
            unit = tl.rsqrt(tl.sum(own * own, 1) / size + eps)
            q_at, k_at = tl.zeros_like(head), tl.zeros_like(head)
        else:
            at_q, at_k = tl.arange(0, Q), tl.arange(0, K)
            whole = summed(parts, token * p_row + at_q, at_q < heads * size, part, PARTS)
            q_unit = tl.rsqrt(tl.sum(whole * whole, 0) / (heads * size) + eps)
            whole = summed(parts, token * p_row + heads * size + at_k, at_k < kv_heads * size, part, PARTS)
            k_unit = tl.rsqrt(tl.sum(whole * whole, 0) / (kv_heads * size) + eps)
            unit = tl.where(is_query, q_unit, k_unit)
            q_at, k_at = head * size, (head - heads) * size
        queries = inside & is_query[:, None]
        others = inside & (head >= heads)[:, None] & (head < heads + kv_heads)[:, None]
        scale = tl.load(q_scales + q_at[:, None] + d[None, :], mask=queries, other=0.0).to(tl.float32)
        scale += tl.load(k_scales + k_at[:, None] + d[None, :], mask=others, other=0.0).to(tl.float32)
        own = own * unit[:, None] * (scale + offset)
        scale = tl.load(q_scales + q_at[:, None] + across[None, :], mask=queries, other=0.0).to(tl.float32)
        scale += tl.load(k_scales + k_at[:, None] + across[None, :], mask=others, other=0.0).to(tl.float32)
        other = other * unit[:, None] * (scale + offset)
    angle = token * a_row + d
    c = tl.load(cos + angle, mask=d < turned, other=1.0).to(tl.float32)
    s = tl.load(sin + angle, mask=d < turned, other=0.0).to(tl.float32)
    s = tl.where(d < half, -s, s)
    rotated = tl.fma(own, tl.broadcast_to(c[None, :], [HEADS, D]), other * s[None, :])
    rotated = tl.where(is_value[:, None], plain, rotated).to(keys.dtype.element_ty)

    at = token * heads * size + head[:, None] * size + d[None, :]
    tl.store(query + at, rotated, mask=inside & is_query[:, None])
    slot = tl.load(lines + token * COLUMNS + SLOT)
    if slot >= 0:  # padding has none
        place = tl.load(lines + token * COLUMNS + PLACE)
        into = place * c_row + slot * c_slot + d[None, :]
        key_head, value_head = (head - heads)[:, None] * c_head, (head - heads - kv_heads)[:, None] * c_head
        tl.store(keys + into + key_head, rotated, mask=inside & (head >= heads)[:, None] & ~is_value[:, None])
        tl.store(values + into + value_head, rotated, mask=inside & is_value[:, None])


ELEMENTS = 1024
"""Values that a program rotates."""


def rotate(
    parts: Tensor, cos: Tensor, sin: Tensor, heads: Heads, keys: Tensor, values: Tensor, lines: Tensor
) -> Tensor:
    """See naive.py. The last axes are contiguous, and so are the lines; keys and values have equal strides, so do cos
    and sin."""
    tokens = len(lines)
    queries, kv_heads, size, norms = heads
    query = torch.empty(tokens, queries, size, dtype=keys.dtype, device=keys.device)
    d = triton.next_power_of_2(size)
    each = max(1, ELEMENTS // d)
    q_scales, k_scales, offset, eps = norms or (query, query, 0.0, 0.0)
    norm = 0 if norms is None else 1 if len(q_scales) == size else 2
    launch(
        _rotate, (tokens, triton.cdiv(queries + 2 * kv_heads, each)), keys.device,
        parts, cos, sin, q_scales, k_scales, query, keys, values, lines,
        *parts.stride()[:2], cos.stride(0), *keys.stride()[:3],
        queries, kv_heads, size, cos.shape[-1], offset, eps,
        PARTS=len(parts), NORM=norm, HEADS=each, D=d, num_warps=4,
        Q=triton.next_power_of_2(queries * size), K=triton.next_power_of_2(kv_heads * size),
    )  # fmt: skip
    return query
