"""Beam extension in two or three kernels. Each logit is read once; nothing of the logits' size is written.

A candidate is one 64-bit number: its score in the high half, its token (negated) in the low half. The largest number is
the best candidate, and of equal scores the one with the smallest token.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from redrafter.kernels.launch import indices, submit

CHUNK = 512
"""Logits per program of the first kernel."""
MOST = 512
"""Most candidates of a row that one program chooses from. If there are more, `_gather` reduces each beam's first."""


@triton.jit
def _sortable(x):
    """fp32 -> int32 in the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _score(key):
    bits = (key >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _base(peak):
    """The subtrahend of exponents: the largest score, or 0 if all are -inf."""
    return tl.where(peak == -float("inf"), 0.0, peak)


@triton.jit
def _chunk(
    logits, temperature, noise, token_ids, keys, peaks, sums, beams, vocab, l_row, l_beam, n_row, n_token,
    WP: tl.constexpr, CHUNK: tl.constexpr, MAPPED: tl.constexpr,
):  # fmt: skip
    """The best tokens of a chunk of one beam's logits under noise, and the chunk's share of the softmax."""
    part, beam, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    at = part * CHUNK + tl.arange(0, CHUNK)
    real = at < vocab
    temp = tl.load(temperature + row)
    x = tl.load(logits + row * l_row + beam * l_beam + at, mask=real, other=0.0).to(tl.float32)
    token = at
    if MAPPED:
        token = tl.load(token_ids + at, mask=real, other=0)
    x = x / tl.where(temp > 0, temp, 1.0)
    x += tl.load(noise + row * n_row + token * n_token, mask=real, other=0.0)
    x = tl.where(real, x, -float("inf"))
    peak = tl.max(x, 0)
    place = (row * beams + beam) * tl.num_programs(0) + part
    tl.store(peaks + place, peak)
    tl.store(sums + place, tl.sum(tl.exp(x - _base(peak)), 0))
    # If a chunk has fewer tokens than are kept, its last token fills up, with a score of -inf.
    key = (_sortable(x).to(tl.int64) << 32) | (0x7FFFFFFF - tl.minimum(at, vocab - 1)).to(tl.int64)
    tl.store(keys + place * WP + tl.arange(0, WP), tl.topk(key, WP))


@triton.jit
def _gather(
    keys, peaks, sums, best_keys, best_peaks, best_sums, parts, WP: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """The best candidates of one beam's chunks, if those of all beams are too many for one program."""
    beam = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    peak = tl.load(peaks + beam * parts + part, mask=part < parts, other=-float("inf"))
    top = tl.max(peak, 0)
    share = tl.load(sums + beam * parts + part, mask=part < parts, other=0.0) * tl.exp(peak - _base(top))
    tl.store(best_peaks + beam, top)
    tl.store(best_sums + beam, tl.sum(share, 0))
    at = tl.arange(0, PARTS * WP)
    key = tl.load(keys + beam * parts * WP + at, mask=at < parts * WP, other=-0x8000000000000000)
    tl.store(best_keys + beam * WP + tl.arange(0, WP), tl.topk(key, WP))


@triton.jit
def _choose(
    keys, peaks, sums, total, token_ids, best_out, parents_out, tokens_out, beams, parts, t_row,
    W: tl.constexpr, WP: tl.constexpr, BEAMS: tl.constexpr, PARTS: tl.constexpr, MAPPED: tl.constexpr,
):  # fmt: skip
    """The best candidates of all beams, by the score of the whole path."""
    row = tl.program_id(0).to(tl.int64)
    beam, part, at = tl.arange(0, BEAMS), tl.arange(0, PARTS), tl.arange(0, PARTS * WP)
    here = (beam < beams)[:, None] & (part < parts)[None, :]
    place = (row * beams + beam)[:, None] * parts + part[None, :]
    peak = tl.load(peaks + place, mask=here, other=-float("inf"))
    top = _base(tl.max(peak, 1))
    share = tl.load(sums + place, mask=here, other=0.0) * tl.exp(peak - top[:, None])
    so_far = tl.load(total + row * t_row + beam, mask=beam < beams, other=0.0)
    ahead = so_far - top - tl.log(tl.sum(share, 1))  # (BEAMS,)
    here = (beam < beams)[:, None] & (at < parts * WP)[None, :]
    key = tl.load(keys + (row * beams + beam)[:, None] * parts * WP + at[None, :], mask=here, other=0)
    score = _score(key) + ahead[:, None]
    candidate = beam[:, None] * (PARTS * WP) + at[None, :]
    key = (_sortable(score).to(tl.int64) << 32) | (0x7FFFFFFF - candidate).to(tl.int64)
    key = tl.where(here, key, -0x8000000000000000)  # below every other number, even that of -inf
    best = tl.topk(tl.reshape(key, (BEAMS * PARTS * WP,)), WP)
    winner = 0x7FFFFFFF - (best & 0x7FFFFFFF)
    parent = winner // (PARTS * WP)
    chosen = tl.load(keys + (row * beams + parent) * parts * WP + winner % (PARTS * WP))
    token = 0x7FFFFFFF - (chosen & 0x7FFFFFFF)
    if MAPPED:
        token = tl.load(token_ids + token)
    i = tl.arange(0, WP)
    tl.store(best_out + row * W + i, _score(best), mask=i < W)
    tl.store(parents_out + row * W + i, parent, mask=i < W)
    tl.store(tokens_out + row * W + i, token, mask=i < W)


def extend(
    logits: Tensor, total: Tensor, temperature: Tensor, noise: Tensor, token_ids: Tensor | None, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See naive.py; fp32 scores, the last axis of the logits contiguous."""
    batch, beams, vocab = logits.shape
    device = logits.device
    wp = max(2, triton.next_power_of_2(width))  # some versions of tl.topk fail for 1
    chunk = CHUNK if vocab <= 32 * CHUNK else 4 * CHUNK
    parts = triton.cdiv(vocab, chunk)
    keys = torch.empty(batch, beams, parts, wp, dtype=torch.long, device=device)
    peaks = torch.empty(batch, beams, parts, device=device)
    sums = torch.empty_like(peaks)
    submit(
        _chunk, (parts, beams, batch),
        logits, temperature, noise, token_ids, keys, peaks, sums, beams, vocab, logits.stride(0), logits.stride(1),
        noise.stride(0), noise.stride(1), WP=wp, CHUNK=chunk, MAPPED=token_ids is not None, num_warps=chunk // 256,
    )  # fmt: skip
    all_parts = triton.next_power_of_2(parts)
    if triton.next_power_of_2(beams) * all_parts * wp > MOST:
        every = keys, peaks, sums, parts
        keys = torch.empty(batch, beams, 1, wp, dtype=torch.long, device=device)
        peaks, sums, parts = peaks.new_empty(batch, beams, 1), peaks.new_empty(batch, beams, 1), 1
        settings = {"WP": wp, "PARTS": all_parts, "num_warps": 4}
        submit(_gather, (batch * beams,), *every[:3], keys, peaks, sums, every[3], **settings)
        all_parts = 1
    best = torch.empty(batch, width, device=device)
    parents, tokens = (indices(batch, width, device=device) for _ in range(2))
    submit(
        _choose, (batch,),
        keys, peaks, sums, total, token_ids, best, parents, tokens, beams, parts, total.stride(0),
        W=width, WP=wp, BEAMS=triton.next_power_of_2(beams), PARTS=all_parts, MAPPED=token_ids is not None, num_warps=4,
    )  # fmt: skip
    return best, parents, tokens
