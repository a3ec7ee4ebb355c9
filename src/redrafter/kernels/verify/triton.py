"""Verification in two launches: logits are read once or twice, nothing of their size is written.

Random numbers are those of core/noise.py, computed where they are used. The p/q test works with logarithms to base 2,
the hardware's own; a row of it is drawn from by programs of which the last to be done takes the best.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from redrafter.kernels.verify import naive
from redrafter.kernels.verify.noise import LOG2E, exponential, gumbel2, key_of, logarithm, power, uniform

SHARE = 4096
"""Logits per program of the p/q test's first pass: 32 a thread, all asked for at once."""
NEAR, STRETCH, SPAN = (tl.constexpr(n) for n in (naive.NEAR, naive.STRETCH, naive.SPAN))
CELL, CELLS = tl.constexpr(naive.CELL), tl.constexpr(naive.SPAN // naive.CELL)
"""A program of its second pass takes a span, each of its threads a cell."""
CHOICE = 512
"""Tokens per program of `seeded`, for several nodes at a time."""


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
            noise = -tl.log(exponential(uniform(key_of(seed, position + d, STREAM), at)))
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
def _tile(row, first, end, stride, BLOCK: tl.constexpr):
    """Logits `first` to `first` + BLOCK of a row, -inf from `end` on. Only the last tile pays for a mask."""
    at = first + tl.arange(0, BLOCK)
    from_ = row + at.to(tl.int64) * stride
    if first + BLOCK <= end:  # noqa: SIM108
        x = tl.load(from_)
    else:
        x = tl.load(from_, mask=at < end, other=-float("inf"))
    return x.to(tl.float32)


@triton.jit
def _unit(heat):
    """Logits times this are logarithms to base 2. At T = 0 they stay as they are, in their order to the last bit."""
    return tl.where(heat > 0, LOG2E / tl.where(heat > 0, heat, 1.0), 1.0)


@triton.jit
def _whole(bases, sums, place, here):
    """(G, S) shares of tiles -> (G,) the largest base of each row and the logarithm of its sum of exponentials."""
    base = tl.load(bases + place, mask=here, other=-float("inf"))
    top = tl.max(base, 1)
    total = tl.sum(tl.load(sums + place, mask=here, other=0.0) * tl.exp2(base - _finite(top)[:, None]), 1)
    return top, tl.log2(total)


@triton.jit
def _shares(
    target, draft, counts, temperature, target_floor, draft_floor, bases, accepted, gamma, vocab, splits,
    t_row, t_node, t_token, d_row, d_node, d_token, tf_row, tf_node, df_row, df_node,
    BLOCK: tl.constexpr, FLOORS: tl.constexpr,
):  # fmt: skip
    """First pass: the largest logit of one tile, and the sum of exponentials relative to it. Rows p first, then q."""
    part, row, depth = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    of_q, split = part // splits, part % splits
    sums = bases + tl.num_programs(1) * 2 * gamma * splits
    end = tl.where(depth < tl.load(counts + row), vocab, 0)  # places that were not drafted are not read
    heat = tl.load(temperature + row)
    if part + depth == 0:
        tl.store(accepted + row, tl.zeros([], tl.int64))  # until the row is done, its programs that are
    if of_q == 0:
        x = _tile(target + row * t_row + depth * t_node, split * BLOCK, end, t_token, BLOCK)
        if FLOORS:
            x = tl.where(x < tl.load(target_floor + row * tf_row + depth * tf_node), -float("inf"), x)
    else:  # may be of another type than p
        x = _tile(draft + row * d_row + depth * d_node, split * BLOCK, end, d_token, BLOCK)
        if FLOORS:
            x = tl.where(x < tl.load(draft_floor + row * df_row + depth * df_node), -float("inf"), x)
    unit, peak = _unit(heat), tl.max(x, 0)
    base = peak * unit
    if heat > 0:
        about = tl.sum(power(tl.fma(x, unit, -_finite(base))), 0)  # fused: a small T makes large numbers of both
    else:
        about = (split * BLOCK + tl.argmax(x, 0)).to(tl.float32, bitcast=True)
    place = (row * 2 * gamma + of_q * gamma + depth) * splits + split
    tl.store(bases + place, base)
    tl.store(sums + place, about)


@triton.jit
def _pick(values, depth, n):
    return tl.sum(tl.where(depth == n, values, 0.0), 0)


@triton.jit
def _left(x, y, p_low, q_low, p_base, p_log, q_base, q_log, unit, FLOORS: tl.constexpr):
    """What q leaves of p."""
    if FLOORS:
        x, y = tl.where(x < p_low, -float("inf"), x), tl.where(y < q_low, -float("inf"), y)
    p, q = power(tl.fma(x, unit, -p_base) - p_log), power(tl.fma(y, unit, -q_base) - q_log)
    return tl.maximum(p - q, 0.0)


@triton.jit
def _rest(
    p_row, q_row, p_low, q_low, p_base, p_log, q_base, q_log, unit, first, vocab, t_token, d_token, FLOORS: tl.constexpr
):
    """By cell of a span, the logarithm of what q leaves of p there."""
    mass = tl.zeros([CELLS], tl.float32)
    for i in tl.static_range(SPAN // STRETCH):
        x = _tile(p_row, first + i * STRETCH, vocab, t_token, STRETCH)
        y = _tile(q_row, first + i * STRETCH, vocab, d_token, STRETCH)
        left = _left(x, y, p_low, q_low, p_base, p_log, q_base, q_log, unit, FLOORS)
        mass += tl.sum(tl.reshape(left, (CELLS, NEAR)), 1)
    return logarithm(mass)


@triton.jit
def _all(p_row, p_low, heat, first, vocab, t_token, FLOORS: tl.constexpr):
    """By cell of a span, the logarithm of its sum of p, not normalised, and the cell; at T = 0 best logit and token."""
    top, mass = tl.full([CELLS], -float("inf"), tl.float32), tl.zeros([CELLS], tl.float32)
    unit, won = _unit(heat), first // CELL + tl.arange(0, CELLS)
    for i in tl.static_range(SPAN // STRETCH):
        x = _tile(p_row, first + i * STRETCH, vocab, t_token, STRETCH)
        if FLOORS:
            x = tl.where(x < p_low, -float("inf"), x)
        x = tl.reshape(x, (CELLS, NEAR))
        here = tl.max(x, 1)
        if heat > 0:
            higher = tl.maximum(top, here * unit)
            mass = mass * power(top - _finite(higher)) + tl.sum(power(tl.fma(x, unit, -_finite(higher)[:, None])), 1)
            top = higher
        else:
            at = tl.reshape(first + i * STRETCH + tl.arange(0, STRETCH), (CELLS, NEAR))
            won = tl.where(here > top, tl.min(tl.where(x == here[:, None], at, 0x7FFFFFFF), 1), won)
            top = tl.maximum(top, here)
    if heat > 0:
        top += logarithm(mass)
    return top, won


@triton.jit
def _winner(score, won, heat, key):
    """The best score among cells, noise added, and whose it is; at T = 0 without noise."""
    if heat > 0:
        score += gumbel2(uniform(key, won + CELL))
    top = tl.max(score, 0)
    return top, tl.min(tl.where(score == top, won, 0x7FFFFFFF), 0)


@triton.jit
def _draw(
    target, draft, tokens, counts, temperature, seeds, positions, target_floor, draft_floor, bases, out, accepted,
    gamma, vocab, splits,
    t_row, t_node, t_token, d_row, d_node, d_token, k_row, k_node, tf_row, tf_node, df_row, df_node,
    ACCEPT: tl.constexpr, RESIDUAL: tl.constexpr, G: tl.constexpr, S: tl.constexpr, P: tl.constexpr,
    FLOORS: tl.constexpr,
):  # fmt: skip
    """Second pass: where the row stops, which every program finds out by itself; then its share of the draw there. The
    last program of a row to be done takes the best cell of all and draws inside it.
    """
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    parts, batch = tl.num_programs(0), tl.num_programs(1)
    sums = bases + batch * 2 * gamma * splits
    heat, count = tl.load(temperature + row), tl.minimum(tl.load(counts + row), gamma).to(tl.int32)
    seed, position = tl.load(seeds + row), tl.load(positions + row) + 1
    depth, split = tl.arange(0, G), tl.arange(0, S)
    drafted = tl.load(tokens + row * k_row + depth * k_node, mask=depth < gamma, other=0)
    real = depth < count
    here = real[:, None] & (split < splits)[None, :]
    place = (row * 2 * gamma + depth)[:, None] * splits + split[None, :]
    px = tl.load(target + row * t_row + depth.to(tl.int64) * t_node + drafted * t_token, mask=real, other=0.0)
    qx = tl.load(draft + row * d_row + depth.to(tl.int64) * d_node + drafted * d_token, mask=real, other=0.0)
    px, qx = px.to(tl.float32), qx.to(tl.float32)
    if FLOORS:
        low = tl.load(target_floor + row * tf_row + depth * tf_node, mask=real, other=0.0)
        px = tl.where(px < low, -float("inf"), px)
        low = tl.load(draft_floor + row * df_row + depth * df_node, mask=real, other=0.0)
        qx = tl.where(qx < low, -float("inf"), qx)

    unit = _unit(heat)
    # At T = 0 these sums are none, and what comes of them is not used.
    p_base, p_log = _whole(bases, sums, place, here)
    q_base, q_log = _whole(bases, sums, place + gamma * splits, here)
    gap = (tl.fma(px, unit, -p_base) - p_log) - (tl.fma(qx, unit, -q_base) - q_log)
    coin = uniform(key_of(seed, position + depth, ACCEPT), tl.zeros([1], tl.int32))
    hit = (tl.log(coin) * LOG2E < gap) & (qx > -float("inf"))
    if heat <= 0:
        where = tl.argmax(tl.load(bases + place, mask=here, other=-float("inf")), 1)
        best = tl.load(sums + (row * 2 * gamma + depth) * splits + where, mask=real, other=0.0)
        hit = drafted == best.to(tl.int32, bitcast=True)
    n = tl.minimum(tl.min(tl.where(hit & real, G, depth), 0), count)

    refused = (n < count) & (heat > 0)
    p_row, q_row = target + row * t_row + n.to(tl.int64) * t_node, draft + row * d_row + n.to(tl.int64) * d_node
    p_low, q_low = 0.0, 0.0
    if FLOORS:
        p_low = tl.load(target_floor + row * tf_row + n * tf_node)
        q_low = tl.load(draft_floor + row * df_row + n * df_node, mask=refused, other=0.0)
    key, first = key_of(seed, position + n, RESIDUAL), part * SPAN
    p_base, p_log = _pick(p_base, depth, n), _pick(p_log, depth, n)
    q_base, q_log = _pick(q_base, depth, n), _pick(q_log, depth, n)
    top, won = tl.full([], -float("inf"), tl.float32), tl.zeros([], tl.int32)
    if refused:
        score = _rest(
            p_row, q_row, p_low, q_low, p_base, p_log, q_base, q_log, unit, first, vocab, t_token, d_token, FLOORS
        )
        top, won = _winner(score, first // CELL + tl.arange(0, CELLS), heat, key)
    if top == -float("inf"):
        # After the last drafted token q is nowhere, and p needs no normalising. Where q leaves nothing, p is offered as
        # well, in case that nothing is left anywhere: a cell below 0.
        score, cell = _all(p_row, p_low, heat, first, vocab, t_token, FLOORS)
        top, won = _winner(score, cell, heat, key)
        won = tl.where(refused, -1 - won, won)

    scores = bases + batch * 4 * gamma * splits
    found = scores + batch * parts
    tl.store(scores + row * parts + part, top)
    tl.store(found + row * parts + part, won.to(tl.float32, bitcast=True))
    tl.debug_barrier()  # both stores, before this program says that it is done
    if tl.atomic_add(accepted + row, tl.full([], 1, tl.int64)) == parts - 1:
        part_, from_ = tl.arange(0, P), row * parts + tl.arange(0, P)
        # Past the first cache: others wrote these.
        score_ = tl.load(scores + from_, mask=part_ < parts, other=-float("inf"), cache_modifier=".cg")
        won_ = tl.load(found + from_, mask=part_ < parts, other=0.0, cache_modifier=".cg").to(tl.int32, bitcast=True)
        won_ = tl.where(part_ < parts, won_, -1)
        left = tl.max(won_, 0) >= 0
        score_ = tl.where((part_ < parts) & ((won_ >= 0) == left), score_, -float("inf"))
        token = tl.sum(tl.where(part_ == tl.argmax(score_, 0), won_, 0), 0)
        token = tl.where(token < 0, -1 - token, token)
        if heat > 0:  # so far a cell
            inner = tl.arange(0, CELL)
            at = token // CELLS * SPAN + token % CELLS * NEAR + inner // NEAR * STRETCH + inner % NEAR
            there = (at >= 0) & (at < vocab)  # below 0 where logits were no numbers
            x = tl.load(p_row + at.to(tl.int64) * t_token, mask=there, other=-float("inf")).to(tl.float32)
            if refused & left:
                y = tl.load(q_row + at.to(tl.int64) * d_token, mask=there, other=-float("inf")).to(tl.float32)
                inside = logarithm(_left(x, y, p_low, q_low, p_base, p_log, q_base, q_log, unit, FLOORS))
            else:
                inside = x * unit
                if FLOORS:
                    inside = tl.where(x < p_low, -float("inf"), inside)
            inside += gumbel2(uniform(key, inner))
            token = tl.min(tl.where(inside == tl.max(inside, 0), at, 0x7FFFFFFF), 0)
        drawn = tl.minimum(tl.maximum(token, 0), vocab - 1).to(tl.int64)
        tl.store(accepted + row, n.to(tl.int64))
        into = out + row * (gamma + 1)
        tl.store(into + depth, tl.where(depth == n, drawn, drafted), mask=depth < gamma)
        tl.store(into + gamma, drawn)


def fused(
    target: Tensor, draft: Tensor, tokens: Tensor, counts: Tensor, temperature: Tensor, seeds: Tensor,
    positions: Tensor, target_floor: Tensor | None, draft_floor: Tensor | None, streams: tuple[int, int],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See naive.py; the numbers of place d are those of position `positions` + 1 + d."""
    batch, gamma = tokens.shape
    vocab, device = target.shape[2], target.device
    splits, parts = triton.cdiv(vocab, SHARE), triton.cdiv(vocab, naive.SPAN)
    out = torch.empty(batch, gamma + 1, dtype=torch.long, device=device)
    accepted = (torch.empty if gamma else torch.zeros)(batch, dtype=torch.long, device=device)
    work = torch.empty(batch * (4 * gamma * splits + 2 * parts), device=device)
    floors = target_floor is not None and draft_floor is not None
    of_floors = target_floor.stride() + draft_floor.stride() if floors else (0,) * 4
    strides = (*target.stride(), *draft.stride())
    if gamma:
        _shares[2 * splits, batch, gamma](
            target, draft, counts, temperature, target_floor, draft_floor, work, accepted, gamma, vocab, splits,
            *strides, *of_floors, BLOCK=SHARE, FLOORS=floors, num_warps=4,
        )  # fmt: skip
    _draw[parts, batch](
        target, draft, tokens, counts, temperature, seeds, positions, target_floor, draft_floor, work, out, accepted,
        gamma, vocab, splits, *strides, *tokens.stride(), *of_floors,
        ACCEPT=streams[0], RESIDUAL=streams[1], G=triton.next_power_of_2(max(gamma, 1)),
        S=triton.next_power_of_2(splits), P=triton.next_power_of_2(parts), FLOORS=floors, num_warps=4,
    )  # fmt: skip
    return out, accepted
