"""The paper's tiles: each reads n elements of p and q, and writes tau, a and a part of b.

The paper's kernel processes the tiles of a row one after another; here they run in parallel, which makes it faster.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 1024
"""The paper's n."""


@triton.jit
def _tile(
    p, q, ratios, rests, masses, gamma, vocab, p_row, p_node, p_token, q_row, q_node, q_token, low, width,
    BLOCK: tl.constexpr, SIGMOID: tl.constexpr,
):  # fmt: skip
    part, depth, row = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    at = part * BLOCK + tl.arange(0, BLOCK)
    here = at < vocab
    x = tl.load(p + row * p_row + depth * p_node + at * p_token, mask=here, other=0.0).to(tl.float32)
    y = tl.load(q + row * q_row + depth * q_node + at * q_token, mask=here, other=0.0).to(tl.float32)
    if SIGMOID:
        x, y = tl.sigmoid((x - low) / width), tl.sigmoid((y - low) / width)
    rest = tl.where(here, tl.maximum(x - y, 0.0), 0.0)
    ratio = tl.where(y > 0, tl.minimum(x / tl.where(y > 0, y, 1.0), 1.0), 0.0)
    into = (row * gamma + depth) * vocab + at
    tl.store(ratios + into, ratio, mask=here)
    tl.store(rests + into, rest, mask=here)
    tl.store(masses + (row * gamma + depth) * tl.num_programs(0) + part, tl.sum(rest, 0))


def tiles(p: Tensor, q: Tensor, scale: tuple[float, float] | None) -> tuple[Tensor, Tensor, Tensor]:
    """See naive.py."""
    batch, gamma, vocab = q.shape
    parts = triton.cdiv(vocab, TILE)
    ratios = torch.empty(batch, gamma, vocab, device=q.device)
    rests = torch.empty_like(ratios)
    masses = torch.empty(batch, gamma, parts, device=q.device)
    low, high = scale or (0.0, 1.0)
    _tile[parts, gamma, batch](
        p, q, ratios, rests, masses, gamma, vocab, *p.stride(), *q.stride(), low, high - low,
        BLOCK=TILE, SIGMOID=scale is not None, num_warps=4,
    )  # fmt: skip
    return ratios, rests, masses.sum(-1)
