"""Beam extension in two or three kernels. Each logit is read once; nothing of the logits' size is written.

A candidate is one 64-bit number: its score in the high half, its token (negated) in the low half. The largest number is
the best candidate, and of equal scores the one with the smallest token. The token of a chain is one more candidate,
which `_choose` inserts among the best of the others.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from redrafter.kernels.launch import indices, launch, wait_for_previous

CHUNKS = 512, 1024, 2048
"""Logits per program of the first kernel: the smallest that needs at most PARTS programs for a beam."""
PARTS = 32
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
def _log_add(x, y):
    """log(exp(x) + exp(y)); one of them is finite."""
    most = tl.maximum(x, y)
    return most + tl.log(tl.exp(x - most) + tl.exp(y - most))


@triton.jit
def _chunk(
    logits, temperature, noise, token_ids, keys, peaks, sums, beams, vocab, l_row, l_beam, n_row, n_token,
    chain_token, follows, mixed, f_row, f_beam,
    WP: tl.constexpr, CHUNK: tl.constexpr, MAPPED: tl.constexpr, CHAIN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The best tokens of a chunk of one beam's logits under noise, and the chunk's share of the softmax.

    Of the beam that follows the chain, also the share of the softmax without noise, and the chain's token.
    """
    wait_for_previous(EARLY)
    part, beam, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    at = part * CHUNK + tl.arange(0, CHUNK)
    real = at < vocab
    temp = tl.load(temperature + row)
    x = tl.load(logits + row * l_row + beam * l_beam + at, mask=real, other=0.0).to(tl.float32)
    token = at
    if MAPPED:
        token = tl.load(token_ids + at, mask=real, other=0)
    plain = tl.where(real, x / tl.where(temp > 0, temp, 1.0), -float("inf"))
    x = plain + tl.load(noise + row * n_row + token * n_token, mask=real, other=0.0)
    peak = tl.max(x, 0)
    place = (row * beams + beam) * tl.num_programs(0) + part
    tl.store(peaks + place, peak)
    tl.store(sums + place, tl.sum(tl.exp(x - _base(peak)), 0))
    # If a chunk has fewer tokens than are kept, its last token fills up, with a score of -inf.
    key = (_sortable(x).to(tl.int64) << 32) | (0x7FFFFFFF - tl.minimum(at, vocab - 1)).to(tl.int64)
    tl.store(keys + place * WP + tl.arange(0, WP), tl.topk(key, WP))
    if CHAIN:  # noqa: SIM102 - a constant and a loaded value are two conditions in Triton
        if tl.load(follows + row * f_row + beam * f_beam) != 0:
            into = mixed + (row * tl.num_programs(0) + part) * 3
            peak = tl.max(plain, 0)
            tl.store(into, peak)
            tl.store(into + 1, tl.sum(tl.exp(plain - _base(peak)), 0))
            here = real & (token == tl.load(chain_token + row))
            tl.store(into + 2, tl.max(tl.where(here, x, -float("inf")), 0))


@triton.jit
def _gather(
    keys, peaks, sums, best_keys, best_peaks, best_sums, parts,
    WP: tl.constexpr, PARTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The best candidates of one beam's chunks, if those of all beams are too many for one program."""
    wait_for_previous(EARLY)
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
    noise, n_row, n_token, chain_token, odds, follows, mixed, follows_out, f_row, f_beam, chunks,
    W: tl.constexpr, WP: tl.constexpr, BEAMS: tl.constexpr, PARTS: tl.constexpr, MAPPED: tl.constexpr,
    CHAIN: tl.constexpr, CHUNKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The best candidates of all beams, by the score of the whole path; see naive.py for the chain's token."""
    wait_for_previous(EARLY)
    row = tl.program_id(0).to(tl.int64)
    beam, part, at = tl.arange(0, BEAMS), tl.arange(0, PARTS), tl.arange(0, PARTS * WP)
    here = (beam < beams)[:, None] & (part < parts)[None, :]
    place = (row * beams + beam)[:, None] * parts + part[None, :]
    peak = tl.load(peaks + place, mask=here, other=-float("inf"))
    top = _base(tl.max(peak, 1))
    share = tl.load(sums + place, mask=here, other=0.0) * tl.exp(peak - top[:, None])
    so_far = tl.load(total + row * t_row + beam, mask=beam < beams, other=0.0)
    norms = top + tl.log(tl.sum(share, 1))  # (BEAMS,)
    ahead = so_far - norms
    here = (beam < beams)[:, None] & (at < parts * WP)[None, :]
    key = tl.load(keys + (row * beams + beam)[:, None] * parts * WP + at[None, :], mask=here, other=0)
    if CHAIN:
        chance = tl.load(odds + row)
        following = tl.load(follows + row * f_row + beam * f_beam, mask=beam < beams, other=0) != 0
        mixes = (tl.sum(following.to(tl.int32), 0) > 0) & (chance > 0)
        copy = tl.load(chain_token + row)
        chunk = tl.arange(0, CHUNKS)
        known = chunk < tl.where(mixes, chunks, 0)
        of_chunk = mixed + (row * chunks + chunk) * 3
        peak = tl.load(of_chunk, mask=known, other=-float("inf"))
        shares = tl.load(of_chunk + 1, mask=known, other=0.0)
        drafted = tl.max(tl.load(of_chunk + 2, mask=known, other=-float("inf")), 0)
        base = _base(tl.max(peak, 0))
        norm = tl.sum(tl.where(following, norms, 0.0), 0)
        rest = tl.log(1 - chance) + norm - base - tl.log(tl.sum(shares * tl.exp(peak - base), 0))
        copied = tl.log(chance) + tl.load(noise + row * n_row + copy * n_token)
        whole = _log_add(rest, copied)
        ahead += tl.where(following, tl.where(mixes, rest - whole, 0.0), 0.0)
        score = tl.sum(tl.where(following, so_far, 0.0), 0) + _log_add(drafted - norm + rest - whole, copied - whole)
    scores = _score(key) + ahead[:, None]
    if CHAIN:  # found by the beam as well: the chain's own candidate replaces it
        token = 0x7FFFFFFF - (key & 0x7FFFFFFF)
        if MAPPED:
            token = tl.load(token_ids + token, mask=here, other=-1)
        twice = following[:, None] & (token == tl.where(mixes, copy, -1))
        scores = tl.where(twice, -float("inf"), scores)
    candidate = beam[:, None] * (PARTS * WP) + at[None, :]
    key = (_sortable(scores).to(tl.int64) << 32) | (0x7FFFFFFF - candidate).to(tl.int64)
    key = tl.where(here, key, -0x8000000000000000)  # below every other number, even that of -inf
    best = tl.topk(tl.reshape(key, (BEAMS * PARTS * WP,)), WP)
    winner = 0x7FFFFFFF - (best & 0x7FFFFFFF)
    parent = winner // (PARTS * WP)
    chosen = tl.load(keys + (row * beams + parent) * parts * WP + winner % (PARTS * WP))
    token = 0x7FFFFFFF - (chosen & 0x7FFFFFFF)
    if MAPPED:
        token = tl.load(token_ids + token)
    i = tl.arange(0, WP)
    into = i
    if CHAIN:
        own = tl.where(mixes, _sortable(score).to(tl.int64) << 32, -0x8000000000000000)
        behind = (best < own).to(tl.int32)  # candidates of the same score come before it
        into = i + behind
        place = WP - tl.sum(behind, 0)
        tl.store(best_out + row * W + place, score, mask=place < W)
        tl.store(parents_out + row * W + place, tl.sum(tl.where(following, beam, 0), 0).to(tl.int64), mask=place < W)
        tl.store(tokens_out + row * W + place, copy, mask=place < W)
        tl.store(follows_out + row * W + i, i == place, mask=i < W)
    tl.store(best_out + row * W + into, _score(best), mask=into < W)
    tl.store(parents_out + row * W + into, parent, mask=into < W)
    tl.store(tokens_out + row * W + into, token, mask=into < W)


class Chain(NamedTuple):
    """The token of a chain, its odds, and which beam has followed the chain; see `naive.extend_with_chain`."""

    token: Tensor  # (B,)
    odds: Tensor  # (B,)
    follows: Tensor  # (B, w) bool


def extend(
    logits: Tensor,
    total: Tensor,
    temperature: Tensor,
    noise: Tensor,
    token_ids: Tensor | None,
    width: int,
    chain: Chain | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """See naive.py; fp32 scores, the temperatures and the last axis of the logits contiguous.

    The last result is None without a chain.
    """
    batch, beams, vocab = logits.shape
    device = logits.device
    wp = max(2, triton.next_power_of_2(width))  # some versions of tl.topk fail for 1
    size = next((c for c in CHUNKS if vocab <= PARTS * c), CHUNKS[-1])
    parts = chunks = triton.cdiv(vocab, size)
    keys = torch.empty(batch, beams, parts, wp, dtype=torch.long, device=device)
    peaks = torch.empty(batch, beams, parts, device=device)
    sums = torch.empty_like(peaks)
    mixed = total if chain is None else torch.empty(batch, chunks, 3, device=device)
    token, odds, follows = chain or (temperature, temperature, total)  # without a chain nothing reads them
    mapped, has_chain = token_ids is not None, chain is not None
    launch(
        _chunk, (parts, beams, batch), device,
        logits, temperature, noise, token_ids, keys, peaks, sums, beams, vocab, logits.stride(0), logits.stride(1),
        *noise.stride(), token, follows, mixed, *follows.stride(),
        WP=wp, CHUNK=size, MAPPED=mapped, CHAIN=has_chain, num_warps=size // 256,
    )  # fmt: skip
    all_parts = triton.next_power_of_2(parts)
    if triton.next_power_of_2(beams) * all_parts * wp > MOST:
        every = keys, peaks, sums, parts
        keys = torch.empty(batch, beams, 1, wp, dtype=torch.long, device=device)
        peaks, sums, parts = peaks.new_empty(batch, beams, 1), peaks.new_empty(batch, beams, 1), 1
        settings = {"WP": wp, "PARTS": all_parts, "num_warps": 4}
        launch(_gather, (batch * beams,), device, *every[:3], keys, peaks, sums, every[3], **settings)
        all_parts = 1
    best = torch.empty(batch, width, device=device)
    parents, tokens = (indices(batch, width, device=device) for _ in range(2))
    still = None if chain is None else torch.empty(batch, width, dtype=torch.bool, device=device)
    launch(
        _choose, (batch,), device,
        keys, peaks, sums, total, token_ids, best, parents, tokens, beams, parts, total.stride(0),
        noise, *noise.stride(), token, odds, follows, mixed, still, *follows.stride(), chunks,
        W=width, WP=wp, BEAMS=triton.next_power_of_2(beams), PARTS=all_parts, MAPPED=mapped,
        CHAIN=has_chain, CHUNKS=triton.next_power_of_2(chunks), num_warps=4,
    )  # fmt: skip
    return best, parents, tokens, still
