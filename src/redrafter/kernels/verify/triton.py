"""Verification in two launches: logits are read at most twice, nothing of their size is written.

Random numbers are those of core/noise.py, computed where they are used. The p/q test works with logarithms to base 2,
the hardware's own. Its programs tell each other what they found by words of 64 bits that are 0 before; whoever waits
for words waits for programs that have started before it, and a row that is known to stop is not read any further.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from redrafter.kernels.verify import naive
from redrafter.kernels.verify.noise import LOG2E, exponential, gumbel2, key_of, logarithm, power, uniform

SHARE = 8192
"""Logits per program of the p/q test's first pass: 64 a thread, all asked for at once."""
REGISTERS = 80
"""So few that six of its programs are on a processor at a time."""
COLDEST = tl.constexpr(1e-6)
"""A T below is taken for this: logits over it are so large that 2 to the power of their rounding is too much."""
WIDE = tl.constexpr(128)
"""Threads of a program. Words that others may be writing are read by as many at a time, or by an atomic: then all of
its threads see the same, and go the same way."""
THERE, NONE = tl.constexpr(0x80000000), tl.constexpr(-0x7FFFFF80000000)
"""The bit of a word that says that it has been written, and the word of -inf and 0."""
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
def _tile(row, first, end, stride, BLOCK: tl.constexpr, AGAIN: tl.constexpr):
    """Logits `first` to `first` + BLOCK of a row, -inf from `end` on. Only the last tile pays for a mask."""
    keep: tl.constexpr = "evict_last" if AGAIN else ""  # for whoever reads them again
    at = first + tl.arange(0, BLOCK)
    from_ = row + at.to(tl.int64) * stride
    if first + BLOCK <= end:
        x = tl.load(from_, eviction_policy=keep)
    else:
        x = tl.load(from_, mask=at < end, other=-float("inf"), eviction_policy=keep)
    return x.to(tl.float32)


@triton.jit
def _unit(heat):
    """Logits times this are logarithms to base 2. At T = 0 they stay as they are, in their order to the last bit."""
    return tl.where(heat > 0, LOG2E / tl.maximum(heat, COLDEST), 1.0)


@triton.jit
def _word(high, low):
    """Two numbers of 32 bits, the second at least 0, as one of 64, stored and seen as a whole. It is never 0."""
    high, low = high.to(tl.int32, bitcast=True).to(tl.int64), low.to(tl.int32, bitcast=True).to(tl.int64)
    return (high << 32) | (low & 0x7FFFFFFF) | THERE


@triton.jit
def _high(word):
    return (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _low(word):
    return word.to(tl.int32) & 0x7FFFFFFF


@triton.jit
def _share(logits, low, first, vocab, stride, heat, BLOCK: tl.constexpr, FLOORS: tl.constexpr):
    """A word: the largest of a tile's logits, to base 2, and the sum of powers relative to it, at T = 0 its place."""
    x = _tile(logits, first, vocab, stride, BLOCK, True)
    if FLOORS:
        x = tl.where(x < low, -float("inf"), x)
    if heat > 0:
        unit = _unit(heat)
        # What one thread has comes together first. Fused: a small T makes large numbers of both.
        own = tl.reshape(x, (BLOCK // (WIDE * NEAR), WIDE, NEAR))
        tops = tl.max(tl.max(own, 2), 0) * unit
        sums = tl.sum(tl.sum(power(tl.fma(own, unit, -_finite(tops)[None, :, None])), 2), 0)
        top = tl.max(tops, 0)
        word = _word(top, tl.sum(sums * power(tops - _finite(top)), 0))
    else:
        word = _word(tl.max(x, 0), first + tl.argmax(x, 0))
    return word


@triton.jit
def _whole(word):
    """The shares of a row -> its largest base and the logarithm of its sum of powers, which has no meaning at T = 0."""
    base = _high(word)
    top = tl.max(base, 0)
    return top, tl.log2(tl.sum(_low(word).to(tl.float32, bitcast=True) * tl.exp2(base - _finite(top)), 0))


@triton.jit
def _stopped(stop, gamma, depth):
    """Whether a row is known to stop before a depth."""
    return tl.atomic_max(stop, 0, sem="relaxed") > gamma - depth


@triton.jit
def _judge(drafted, px, qx, heat, key, shares, splits, stop, gamma, depth, record, S: tl.constexpr):
    """Waits for a drafted token's shares of p and q. Where it is refused, its row stops; what the draw needs then is
    the record: the bases of p and of q, and how much larger p's sum is.
    """
    unit, coin = _unit(heat), tl.max(tl.log(uniform(key, tl.zeros([1], tl.int32))), 0) * LOG2E
    split, waits = tl.arange(0, S), tl.full([], 1, tl.int32)
    while waits > 0:
        p = tl.load(shares + split, mask=split < splits, other=NONE, volatile=True)
        q = tl.load(shares + splits + split, mask=split < splits, other=NONE, volatile=True)
        waits = tl.max(((p == 0) | (q == 0)).to(tl.int32), 0)
        if waits == 0:
            p_base, p_log = _whole(p)
            q_base, q_log = _whole(q)
            if heat > 0:
                # A difference: where p = q it is 0, and no coin refuses.
                gap = (tl.fma(px, unit, -p_base) - p_log) - (tl.fma(qx, unit, -q_base) - q_log)
                hit = (coin < gap) & (qx > -float("inf"))
            else:
                hit = drafted == tl.min(tl.where(_high(p) == p_base, _low(p), 0x7FFFFFFF), 0)
            if hit == 0:
                tl.atomic_max(stop, (gamma - depth).to(tl.int64), sem="relaxed")
            tl.store(record, p_base)
            tl.store(record + 1, q_base)
            tl.store(record + 2, tl.exp2(p_log - q_log))
        elif _stopped(stop, gamma, depth):
            waits = tl.zeros([], tl.int32)  # nobody asks any more


@triton.jit
def _shares(
    target, draft, tokens, counts, temperature, seeds, positions, target_floor, draft_floor, words, records,
    batch, gamma, vocab, splits,
    t_row, t_node, t_token, d_row, d_node, d_token, k_row, k_node, tf_row, tf_node, df_row, df_node,
    ACCEPT: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr, FLOORS: tl.constexpr,
):  # fmt: skip
    """First pass. Programs start in the order of their numbers: depth by depth, row by row, those that read a tile of p
    or of q, then the one that waits for them and judges the drafted token. Rows known to stop before are left out.
    """
    program = tl.program_id(0)
    part, line = program % (2 * splits + 1), program // (2 * splits + 1)
    row, depth = (line % batch).to(tl.int64), line // batch
    stop, shares = words + row, words + batch + (row * gamma + depth) * 2 * splits
    p_row, q_row = target + row * t_row + depth.to(tl.int64) * t_node, draft + row * d_row + depth.to(tl.int64) * d_node
    heat = tl.load(temperature + row)
    gone = depth >= tl.load(counts + row)
    if depth > 0:
        gone |= _stopped(stop, gamma, depth)
    if gone == 0:
        p_low, q_low = 0.0, 0.0
        if FLOORS:
            p_low = tl.load(target_floor + row * tf_row + depth * tf_node)
            q_low = tl.load(draft_floor + row * df_row + depth * df_node)
        if part < splits:
            tl.store(shares + part, _share(p_row, p_low, part * BLOCK, vocab, t_token, heat, BLOCK, FLOORS))
        elif part < 2 * splits:  # may be of another type than p
            first = (part - splits) * BLOCK
            tl.store(shares + part, _share(q_row, q_low, first, vocab, d_token, heat, BLOCK, FLOORS))
        else:
            drafted = tl.load(tokens + row * k_row + depth * k_node)
            key = key_of(tl.load(seeds + row), tl.load(positions + row) + 1 + depth, ACCEPT)
            px = tl.load(p_row + drafted * t_token).to(tl.float32)
            qx = tl.load(q_row + drafted * d_token).to(tl.float32)
            if FLOORS:
                px, qx = tl.where(px < p_low, -float("inf"), px), tl.where(qx < q_low, -float("inf"), qx)
            record = records + (row * gamma + depth) * 3
            _judge(drafted, px, qx, heat, key, shares, splits, stop, gamma, depth, record, S)


@triton.jit
def _left(x, y, p_low, q_low, p_base, q_base, ratio, unit, FLOORS: tl.constexpr):
    """What q leaves of p, in p's unit."""
    if FLOORS:
        x, y = tl.where(x < p_low, -float("inf"), x), tl.where(y < q_low, -float("inf"), y)
    return tl.maximum(tl.fma(power(tl.fma(y, unit, -q_base)), -ratio, power(tl.fma(x, unit, -p_base))), 0.0)


@triton.jit
def _all(p_row, p_low, heat, first, vocab, t_token, FLOORS: tl.constexpr):
    """By cell of a span, the logarithm of its sum of p, not normalised, and the cell; at T = 0 best logit and token."""
    top, mass = tl.full([CELLS], -float("inf"), tl.float32), tl.zeros([CELLS], tl.float32)
    unit, won = _unit(heat), first // CELL + tl.arange(0, CELLS)
    for i in tl.static_range(SPAN // STRETCH):
        x = _tile(p_row, first + i * STRETCH, vocab, t_token, STRETCH, False)
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
    target, draft, tokens, counts, temperature, seeds, positions, target_floor, draft_floor, words, records, out,
    accepted, gamma, vocab, splits,
    t_row, t_node, t_token, d_row, d_node, d_token, k_row, k_node, tf_row, tf_node, df_row, df_node,
    RESIDUAL: tl.constexpr, G: tl.constexpr, P: tl.constexpr, FLOORS: tl.constexpr,
):  # fmt: skip
    """Second pass: a share of the draw where the row stops. The last program of a row waits for the others, takes the
    best cell of all and draws inside it.
    """
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    parts, batch = tl.num_programs(0) - 1, tl.num_programs(1)
    stop, heat = tl.load(words + row).to(tl.int32), tl.load(temperature + row)
    seed, position = tl.load(seeds + row), tl.load(positions + row) + 1
    count = tl.minimum(tl.load(counts + row), gamma).to(tl.int32)
    n = tl.where(stop > 0, gamma - stop, count)
    refused, unit = (n < count) & (heat > 0), _unit(heat)
    p_row, q_row = target + row * t_row + n.to(tl.int64) * t_node, draft + row * d_row + n.to(tl.int64) * d_node
    p_low, q_low = 0.0, 0.0
    if FLOORS:
        p_low = tl.load(target_floor + row * tf_row + n * tf_node)
        q_low = tl.load(draft_floor + row * df_row + n * df_node, mask=refused, other=0.0)
    key, record = key_of(seed, position + n, RESIDUAL), records + (row * gamma + n) * 3
    p_base, q_base = tl.load(record, mask=refused, other=0.0), tl.load(record + 1, mask=refused, other=0.0)
    ratio = tl.load(record + 2, mask=refused, other=0.0)
    drawn = words + batch + batch * gamma * 2 * splits + row * parts

    if part < parts:
        top, won, first = tl.full([], -float("inf"), tl.float32), tl.zeros([], tl.int32), part * SPAN
        if refused:
            mass = tl.zeros([CELLS], tl.float32)
            for i in tl.static_range(SPAN // STRETCH):
                x = _tile(p_row, first + i * STRETCH, vocab, t_token, STRETCH, False)
                y = _tile(q_row, first + i * STRETCH, vocab, d_token, STRETCH, False)
                left = _left(x, y, p_low, q_low, p_base, q_base, ratio, unit, FLOORS)
                mass += tl.sum(tl.reshape(left, (CELLS, NEAR)), 1)
            score = logarithm(mass)
            top, won = _winner(score, first // CELL + tl.arange(0, CELLS), heat, key)
        offered = refused & (top == -float("inf"))
        if top == -float("inf"):
            # After the last drafted token q is nowhere, and p needs no normalising. Where q leaves nothing, p is
            # offered as well, in case that nothing is left anywhere.
            score, cell = _all(p_row, p_low, heat, first, vocab, t_token, FLOORS)
            top, won = _winner(score, cell, heat, key)
        tl.store(drawn + part, _word(top, won * 2 + offered.to(tl.int32)))  # its last bit says what is only offered
    else:
        other, waits = tl.arange(0, P), tl.full([], 1, tl.int32)
        token, some = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
        while waits > 0:
            word = tl.load(drawn + other, mask=other < parts, other=NONE + 1, volatile=True)  # as if offered
            waits = tl.max((word == 0).to(tl.int32), 0)
            if waits == 0:
                code = _low(word)
                some = tl.max(1 - (code & 1), 0)  # where q leaves something anywhere, offers do not count
                found = tl.where((code & 1) == 1 - some, _high(word), -float("inf"))
                token = tl.sum(tl.where(other == tl.argmax(found, 0), code >> 1, 0), 0)
        if heat > 0:  # so far a cell
            inner = tl.arange(0, CELL)
            at = token // CELLS * SPAN + token % CELLS * NEAR + inner // NEAR * STRETCH + inner % NEAR
            there = (at >= 0) & (at < vocab)  # elsewhere where logits were no numbers
            x = tl.load(p_row + at.to(tl.int64) * t_token, mask=there, other=-float("inf")).to(tl.float32)
            if refused & (some > 0):
                y = tl.load(q_row + at.to(tl.int64) * d_token, mask=there, other=-float("inf")).to(tl.float32)
                inside = logarithm(_left(x, y, p_low, q_low, p_base, q_base, ratio, unit, FLOORS))
            else:
                inside = x * unit
                if FLOORS:
                    inside = tl.where(x < p_low, -float("inf"), inside)
            inside += gumbel2(uniform(key, inner))
            token = tl.min(tl.where(inside == tl.max(inside, 0), at, 0x7FFFFFFF), 0)
        token = tl.minimum(tl.maximum(token, 0), vocab - 1).to(tl.int64)
        depth, into = tl.arange(0, G), out + row * (gamma + 1)
        drafted = tl.load(tokens + row * k_row + depth * k_node, mask=depth < gamma, other=0)
        tl.store(accepted + row, n.to(tl.int64))
        tl.store(into + depth, tl.where(depth == n, token, drafted), mask=depth < gamma)
        tl.store(into + gamma, token)


def fused(
    target: Tensor, draft: Tensor, tokens: Tensor, counts: Tensor, temperature: Tensor, seeds: Tensor,
    positions: Tensor, target_floor: Tensor | None, draft_floor: Tensor | None, streams: tuple[int, int],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See naive.py; the numbers of place d are those of position `positions` + 1 + d."""
    batch, gamma = tokens.shape
    vocab, device = target.shape[2], target.device
    splits, parts = triton.cdiv(vocab, SHARE), triton.cdiv(vocab, naive.SPAN)
    out = torch.empty(batch, gamma + 1, dtype=torch.long, device=device)
    accepted = torch.empty(batch, dtype=torch.long, device=device)
    # By row: how far from the end it stops, or 0; shares of p and of q by place; what the second pass has drawn.
    words = torch.zeros(batch * (1 + 2 * gamma * splits + parts), dtype=torch.long, device=device)
    records = torch.empty(batch, gamma, 3, device=device)
    floors = target_floor is not None and draft_floor is not None
    of_floors = target_floor.stride() + draft_floor.stride() if floors else (0,) * 4
    given = (target, draft, tokens, counts, temperature, seeds, positions, target_floor, draft_floor, words, records)
    strides = (*target.stride(), *draft.stride(), *tokens.stride(), *of_floors)
    if gamma:
        _shares[(gamma * batch * (2 * splits + 1),)](
            *given, batch, gamma, vocab, splits, *strides, ACCEPT=streams[0], S=_wide(splits), BLOCK=SHARE,
            FLOORS=floors, num_warps=4, maxnreg=REGISTERS,
        )  # fmt: skip
    _draw[parts + 1, batch](
        *given, out, accepted, gamma, vocab, splits, *strides, RESIDUAL=streams[1],
        G=triton.next_power_of_2(max(gamma, 1)), P=_wide(parts), FLOORS=floors, num_warps=4,
    )  # fmt: skip
    return out, accepted


def _wide(count: int) -> int:
    return max(WIDE.value, triton.next_power_of_2(count))
