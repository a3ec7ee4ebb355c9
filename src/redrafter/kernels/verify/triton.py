"""Verification in two or three launches: logits are read once or twice, nothing of their size is written.

Random numbers are those of core/noise.py, computed where they are used. Gumbel-max over the residual is done as a race
that needs one logarithm a token instead of four: argmax of log w + g, where g = -log E and E = -log(1 - u), is the
argmax of w / E. A tile's weights are relative to its largest p. Two g differ by 41 at most, and where q leaves
anything of p it leaves 2^-24, so what could still win is e^-58 at least: far from underflow.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

GOLDEN = tl.constexpr(-0x61C8864680B583EB)
MIX_1 = tl.constexpr(-0x40A7B892E31B1A47)
MIX_2 = tl.constexpr(-0x6B2FB644ECCEEE15)
LOG2E = tl.constexpr(1.4426950408889634)

SHARE = 4096
"""Logits per program of the p/q test's first pass: 32 a thread, all asked for at once."""
DRAW = (1024, 4096)
"""Tokens per program of its second pass. Few rows: small tiles, to fill the machine. Many: large ones, since each
program first finds out where its row stops."""
CHOICE = 512
"""Tokens per program of `seeded`, for several nodes at a time."""


@triton.jit
def _mix(z):
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * MIX_1
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * MIX_2
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


@triton.jit
def _key(seed, position, STREAM: tl.constexpr):
    row = _mix(_mix(seed + GOLDEN) + tl.full([], STREAM + 1, tl.int64) * GOLDEN)
    return _mix(row + (position + 1) * GOLDEN)


@triton.jit
def _uniform(key, token):
    """In (0, 1), as core/noise.py has it in fp32."""
    bits = (_mix(key + (token.to(tl.int64) + 1) * GOLDEN) >> 11) & 0x1FFFFFFFFFFFFF
    return tl.minimum((bits.to(tl.float32) + 0.5) * 1.1102230246251565e-16, 0.999999940395355224609375)


@triton.jit
def _exponential(u):
    """-log1p(-u). Triton has no log1p; log(w) · u / (w - 1) with w = 1 - u takes back what rounding w lost."""
    w = 1.0 - u
    return tl.where(w == 1.0, u, tl.log(w) * (u / tl.where(w == 1.0, -1.0, w - 1.0)))


@triton.jit
def _finite(x):
    return tl.where(x == -float("inf"), 0.0, x)


@triton.jit
def _node_choices(
    logits, depths, temperature, seeds, positions, floor, scores, found,
    nodes, vocab, l_row, l_node, l_token, d_row, d_node, f_row, f_node,
    STREAM: tl.constexpr, NODES: tl.constexpr, BLOCK: tl.constexpr, FLOOR: tl.constexpr,
):  # fmt: skip
    """The best of one tile of the vocabulary for each of several nodes; nodes of one depth share its noise."""
    part, group, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    at, node = part * BLOCK + tl.arange(0, BLOCK), group * NODES + tl.arange(0, NODES)
    real = node < nodes
    here = real[:, None] & (at < vocab)[None, :]
    heat = tl.load(temperature + row)
    from_ = logits + row * l_row + node.to(tl.int64)[:, None] * l_node + at.to(tl.int64)[None, :] * l_token
    x = tl.load(from_, mask=here, other=-float("inf")).to(tl.float32)
    if FLOOR:
        low = tl.load(floor + row * f_row + node * f_node, mask=real, other=0.0)
        x = tl.where(x < low[:, None], -float("inf"), x)
    if heat > 0:
        x = x / heat
        seed, position = tl.load(seeds + row), tl.load(positions + row) + 1
        depth = tl.load(depths + row * d_row + node * d_node, mask=real, other=-1).to(tl.int32)
        first, last = tl.min(tl.where(real, depth, 0x7FFFFFFF), 0), tl.max(depth, 0)
        for d in range(first, last + 1):
            noise = -tl.log(_exponential(_uniform(_key(seed, position + d, STREAM), at)))
            x = tl.where((depth == d)[:, None], x + noise[None, :], x)
    best, token = tl.max(x, 1, return_indices=True)
    place = (row * nodes + node) * tl.num_programs(0) + part
    tl.store(scores + place, best, mask=real)
    tl.store(found + place, part * BLOCK + token, mask=real)


@triton.jit
def _best_part(scores, found, out, parts, P: tl.constexpr):
    """One node: the best of its tiles."""
    node, part = tl.program_id(0).to(tl.int64), tl.arange(0, P)
    score = tl.load(scores + node * parts + part, mask=part < parts, other=-float("inf"))
    best = tl.argmax(score, 0)
    tl.store(out + node, tl.load(found + node * parts + best).to(tl.int64))


def seeded(
    logits: Tensor, depths: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, floor: Tensor | None,
    stream: int,
) -> Tensor:  # fmt: skip
    """See naive.py; the noise of depth d is that of position `positions` + 1 + d."""
    batch, nodes, vocab = logits.shape
    parts = triton.cdiv(vocab, CHOICE)
    together = min(8, triton.next_power_of_2(nodes))
    scores = torch.empty(batch, nodes, parts, device=logits.device)
    found = torch.empty(batch, nodes, parts, dtype=torch.int32, device=logits.device)
    out = torch.empty(batch, nodes, dtype=torch.long, device=logits.device)
    _node_choices[parts, triton.cdiv(nodes, together), batch](
        logits, depths, temperature, seeds, positions, floor, scores, found,
        nodes, vocab, *logits.stride(), *depths.stride(), *(floor.stride() if floor is not None else (0, 0)),
        STREAM=stream, NODES=together, BLOCK=CHOICE, FLOOR=floor is not None, num_warps=4,
    )  # fmt: skip
    _best_part[(batch * nodes,)](scores, found, out, parts, P=triton.next_power_of_2(parts), num_warps=1)
    return out


@triton.jit
def _shares(
    target, draft, counts, temperature, target_floor, draft_floor, peaks, sums, bests,
    gamma, vocab, t_row, t_node, t_token, d_row, d_node, d_token, tf_row, tf_node, df_row, df_node,
    BLOCK: tl.constexpr, FLOORS: tl.constexpr,
):  # fmt: skip
    """First pass: the largest logit of one tile, and the sum of exponentials relative to it. Rows p first, then q."""
    split, which, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    at, depth = split * BLOCK + tl.arange(0, BLOCK), (which % gamma).to(tl.int64)
    here = at < tl.where(depth < tl.load(counts + row), vocab, 0)  # places that were not drafted are not read
    heat = tl.load(temperature + row)
    token = at.to(tl.int64)
    if which < gamma:
        p = target + row * t_row + depth * t_node + token * t_token
        x = tl.load(p, mask=here, other=-float("inf")).to(tl.float32)
        if FLOORS:
            x = tl.where(x < tl.load(target_floor + row * tf_row + depth * tf_node), -float("inf"), x)
    else:
        q = draft + row * d_row + depth * d_node + token * d_token  # may be of another type than p
        x = tl.load(q, mask=here, other=-float("inf")).to(tl.float32)
        if FLOORS:
            x = tl.where(x < tl.load(draft_floor + row * df_row + depth * df_node), -float("inf"), x)
    peak = tl.max(x, 0)
    place = (row * 2 * gamma + which) * tl.num_programs(0) + split
    tl.store(peaks + place, peak)
    if heat > 0:
        tl.store(sums + place, tl.sum(tl.exp2((x - _finite(peak)) * (LOG2E / heat)), 0))
    else:
        tl.store(bests + place, split * BLOCK + tl.argmax(x, 0))


@triton.jit
def _whole(peaks, sums, place, here, cold):
    """(G, S) shares of tiles -> (G,) the largest logit of each row and the log of its sum of exponentials."""
    peak = tl.load(peaks + place, mask=here, other=-float("inf"))
    top = tl.max(peak, 1)
    share = tl.load(sums + place, mask=here, other=0.0)
    total = tl.sum(share * tl.exp2((peak - _finite(top)[:, None]) * (LOG2E * cold)), 1)
    return top, tl.log(total)


@triton.jit
def _pick(values, depth, n):
    return tl.sum(tl.where(depth == n, values, 0.0), 0)


@triton.jit
def _draw(
    target, draft, tokens, counts, temperature, seeds, positions, target_floor, draft_floor, peaks, sums, bests,
    accepted, scores, found, gamma, vocab, splits,
    t_row, t_node, t_token, d_row, d_node, d_token, k_row, k_node, tf_row, tf_node, df_row, df_node,
    ACCEPT: tl.constexpr, RESIDUAL: tl.constexpr, G: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr,
    FLOORS: tl.constexpr,
):  # fmt: skip
    """Second pass: where the row stops, which every program finds out by itself; then one tile of the draw there."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    heat, count = tl.load(temperature + row), tl.load(counts + row)
    cold = 1.0 / tl.where(heat > 0, heat, 1.0)
    seed, position = tl.load(seeds + row), tl.load(positions + row) + 1
    depth, split = tl.arange(0, G), tl.arange(0, S)
    real = depth < tl.minimum(count, gamma)
    here = real[:, None] & (split < splits)[None, :]
    place = (row * 2 * gamma + depth)[:, None] * splits + split[None, :]
    token = tl.load(tokens + row * k_row + depth * k_node, mask=real, other=0)
    px = tl.load(target + row * t_row + depth.to(tl.int64) * t_node + token * t_token, mask=real, other=0.0)
    qx = tl.load(draft + row * d_row + depth.to(tl.int64) * d_node + token * d_token, mask=real, other=0.0)
    px, qx = px.to(tl.float32), qx.to(tl.float32)
    if FLOORS:
        low = tl.load(target_floor + row * tf_row + depth * tf_node, mask=real, other=0.0)
        px = tl.where(px < low, -float("inf"), px)
        low = tl.load(draft_floor + row * df_row + depth * df_node, mask=real, other=0.0)
        qx = tl.where(qx < low, -float("inf"), qx)

    # At T = 0 no sums were written; what comes of them is not used.
    p_peak, p_log = _whole(peaks, sums, place, here, cold)
    q_peak, q_log = _whole(peaks, sums, place + gamma * splits, here, cold)
    gap = ((px - p_peak) * cold - p_log) - ((qx - q_peak) * cold - q_log)
    coin = _uniform(_key(seed, position + depth, ACCEPT), tl.zeros([1], tl.int32))
    hit = (tl.log(coin) < gap) & (qx > -float("inf"))
    if heat <= 0:
        where = tl.argmax(tl.load(peaks + place, mask=here, other=-float("inf")), 1)
        best = tl.load(bests + (row * 2 * gamma + depth) * splits + where, mask=real, other=-1)
        hit = token == best
    n = tl.minimum(tl.min(tl.where(hit & real, G, depth), 0), tl.minimum(count, gamma).to(tl.int32))
    if part == 0:
        tl.store(accepted + row, n.to(tl.int64))

    refused = (n < count) & (heat > 0)
    at = part * BLOCK + tl.arange(0, BLOCK)
    inside = at < vocab
    n_ = n.to(tl.int64)
    x = tl.load(target + row * t_row + n_ * t_node + at.to(tl.int64) * t_token, mask=inside, other=-float("inf")).to(
        tl.float32
    )
    y = tl.load(
        draft + row * d_row + n_ * d_node + at.to(tl.int64) * d_token,
        mask=at < tl.where(refused, vocab, 0),
        other=-float("inf"),
    ).to(tl.float32)
    if FLOORS:
        x = tl.where(x < tl.load(target_floor + row * tf_row + n_ * tf_node), -float("inf"), x)
        low = tl.load(draft_floor + row * df_row + n_ * df_node, mask=refused, other=0.0)
        y = tl.where(y < low, -float("inf"), y)
    # After the last drafted token q is nowhere, and p needs no normalising: the race is the same up to a factor.
    lp = tl.where(refused, (x - _pick(p_peak, depth, n)) * cold - _pick(p_log, depth, n), x * cold)
    lq = tl.where(refused, (y - _pick(q_peak, depth, n)) * cold - _pick(q_log, depth, n), -float("inf"))
    left = tl.where(lp > lq, 1.0 - tl.exp(lq - lp), 0.0)  # what q leaves of p, as a factor
    some = tl.max(left, 0) > 0
    left = tl.where(some, left, 1.0)
    top = _finite(tl.max(tl.where(left > 0, lp, -float("inf")), 0))
    weight = tl.where(left > 0, tl.exp(lp - top) * left, 0.0)
    race = tl.where(inside, weight / _exponential(_uniform(_key(seed, position + n, RESIDUAL), at)), -1.0)
    race = tl.where(heat > 0, race, lp)
    best, index = tl.max(race, 0, return_indices=True)
    place = row * tl.num_programs(0) + part
    tl.store(scores + place, tl.where(heat > 0, top + tl.log(tl.maximum(best, 0.0)), best))
    # A tile where q leaves nothing offers p itself, in case that no tile has anything left: a token below 0.
    index = part * BLOCK + index
    tl.store(found + place, tl.where(some, index, -1 - index))


@triton.jit
def _finish(tokens, accepted, scores, found, out, gamma, parts, k_row, k_node, P: tl.constexpr, G: tl.constexpr):
    """One row: the best of its tiles goes behind the accepted tokens."""
    row, part, place = tl.program_id(0).to(tl.int64), tl.arange(0, P), tl.arange(0, G)
    score = tl.load(scores + row * parts + part, mask=part < parts, other=-float("inf"))
    token = tl.load(found + row * parts + part, mask=part < parts, other=-1)
    left = tl.max(token, 0) >= 0
    score = tl.where((part < parts) & ((token >= 0) == left), score, -float("inf"))
    drawn = tl.sum(tl.where(part == tl.argmax(score, 0), token, 0), 0)
    drawn = tl.where(drawn < 0, -1 - drawn, drawn).to(tl.int64)
    n = tl.load(accepted + row)
    drafted = tl.load(tokens + row * k_row + place * k_node, mask=place < gamma, other=0)
    tl.store(out + row * (gamma + 1) + place, tl.where((place == n) | (place == gamma), drawn, drafted),
             mask=place <= gamma)  # fmt: skip


def fused(
    target: Tensor, draft: Tensor, tokens: Tensor, counts: Tensor, temperature: Tensor, seeds: Tensor,
    positions: Tensor, target_floor: Tensor | None, draft_floor: Tensor | None, streams: tuple[int, int],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See naive.py; the numbers of place d are those of position `positions` + 1 + d."""
    batch, gamma = tokens.shape
    vocab, device = target.shape[2], target.device
    splits = triton.cdiv(vocab, SHARE)
    peaks = torch.empty(batch, 2 * gamma, splits, device=device)
    sums = torch.empty_like(peaks)
    bests = torch.empty_like(peaks, dtype=torch.int32)
    accepted = torch.empty(batch, dtype=torch.long, device=device)
    out = torch.empty(batch, gamma + 1, dtype=torch.long, device=device)
    block = DRAW[batch >= 16]
    parts = triton.cdiv(vocab, block)
    scores = torch.empty(batch, parts, device=device)
    found = torch.empty(batch, parts, dtype=torch.int32, device=device)
    floors = target_floor is not None and draft_floor is not None
    strides = target_floor.stride() + draft_floor.stride() if floors else (0,) * 4
    if gamma:
        _shares[splits, 2 * gamma, batch](
            target, draft, counts, temperature, target_floor, draft_floor, peaks, sums, bests,
            gamma, vocab, *target.stride(), *draft.stride(), *strides, BLOCK=SHARE, FLOORS=floors, num_warps=4,
        )  # fmt: skip
    _draw[parts, batch](
        target, draft, tokens, counts, temperature, seeds, positions, target_floor, draft_floor, peaks, sums, bests,
        accepted, scores, found, gamma, vocab, splits, *target.stride(), *draft.stride(), *tokens.stride(), *strides,
        ACCEPT=streams[0], RESIDUAL=streams[1], G=triton.next_power_of_2(max(gamma, 1)),
        S=triton.next_power_of_2(splits), BLOCK=block, FLOORS=floors, num_warps=4 if block < 4096 else 8,
    )  # fmt: skip
    _finish[(batch,)](
        tokens, accepted, scores, found, out, gamma, parts, *tokens.stride(),
        P=triton.next_power_of_2(parts), G=triton.next_power_of_2(gamma + 1), num_warps=1,
    )  # fmt: skip
    return out, accepted
