"""Verification on a GPU. Logits are read once, and once more where a row stops; nothing of their size is written.

The programs compute the random numbers of core/noise.py themselves. The p/q test is one launch and uses logarithms to
base 2, which are one instruction. Its programs pass results to each other as 64-bit words, which are 0 until written. A
program waits only on programs with lower ids, which have started before it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from redrafter.kernels.launch import indices, submit
from redrafter.kernels.verify import naive
from redrafter.kernels.verify.noise import LOG2E, gumbel, gumbel2, key_of, logarithm, power, uniform

SMALLEST_T = tl.constexpr(1e-6)
"""The smallest T above 0; a smaller one counts as this. Below, the rounding errors of logits / T would overflow."""
WIDE = tl.constexpr(128)
"""Threads of a program. Words that other programs may be writing are read by this many threads at once, or by an
atomic, so that all threads of a program see the same value and take the same branch."""
THERE, NONE = tl.constexpr(0x80000000), tl.constexpr(-0x7FFFFF80000000)
"""The bit that marks a word as written, and the word for (-inf, 0)."""
NEAR, STRETCH, SPAN = (tl.constexpr(n) for n in (naive.NEAR, naive.STRETCH, naive.SPAN))
CELL, CELLS = tl.constexpr(naive.CELL), tl.constexpr(naive.SPAN // naive.CELL)
"""A program of the p/q test handles one span, each of its threads one cell."""
ACCEPTED, REFUSED, OVER = (tl.constexpr(n) for n in (1, 2, 3))
"""Verdicts on a drafted token; OVER: the row stopped before it."""
CHOICE = 512
"""Tokens per program of `seeded`; a program handles several nodes."""


@triton.jit
def _finite(x):
    return tl.where(x == -float("inf"), 0.0, x)


@triton.jit
def _node_choices(
    logits, depths, temperature, seeds, positions, floor, scores, found,
    nodes, vocab, l_row, l_node, l_token, d_row, d_node, f_row, f_node,
    STREAM: tl.constexpr, NODES: tl.constexpr, BLOCK: tl.constexpr, FLOOR: tl.constexpr,
):  # fmt: skip
    """The best token of one tile of the vocabulary, for each of several nodes; nodes of one depth share noise."""
    part, group, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    at, node = part * BLOCK + tl.arange(0, BLOCK), group * NODES + tl.arange(0, NODES)
    real = node < nodes
    here = real[:, None] & (at < vocab)[None, :]
    temp = tl.load(temperature + row)
    from_ = logits + row * l_row + node.to(tl.int64)[:, None] * l_node + at.to(tl.int64)[None, :] * l_token
    x = tl.load(from_, mask=here, other=-float("inf")).to(tl.float32)
    if FLOOR:
        low = tl.load(floor + row * f_row + node * f_node, mask=real, other=0.0)
        x = tl.where(x < low[:, None], -float("inf"), x)
    if temp > 0:
        x = x / temp
        seed, position = tl.load(seeds + row), tl.load(positions + row) + 1
        depth = tl.load(depths + row * d_row + node * d_node, mask=real, other=-1).to(tl.int32)
        first, last = tl.min(tl.where(real, depth, 0x7FFFFFFF), 0), tl.max(depth, 0)
        for d in range(first, last + 1):
            noise = gumbel(key_of(seed, position + d, STREAM), at)
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
    """See naive.py; depth d uses the noise of position `positions` + 1 + d."""
    batch, nodes, vocab = logits.shape
    parts = triton.cdiv(vocab, CHOICE)
    together = min(8, triton.next_power_of_2(nodes))
    scores = torch.empty(batch, nodes, parts, device=logits.device)
    found = torch.empty(batch, nodes, parts, dtype=torch.int32, device=logits.device)
    out = indices(batch, nodes, device=logits.device)
    submit(
        _node_choices, (parts, triton.cdiv(nodes, together), batch),
        logits, depths, temperature, seeds, positions, floor, scores, found,
        nodes, vocab, *logits.stride(), *depths.stride(), *(floor.stride() if floor is not None else (0, 0)),
        STREAM=stream, NODES=together, BLOCK=CHOICE, FLOOR=floor is not None, num_warps=4,
    )  # fmt: skip
    submit(_best_part, (batch * nodes,), scores, found, out, parts, P=triton.next_power_of_2(parts), num_warps=1)
    return out


@triton.jit
def _unit(temp):
    """Logits times this are logarithms to base 2. At T = 0 it is 1, which keeps the exact order of the logits."""
    return tl.where(temp > 0, LOG2E / tl.maximum(temp, SMALLEST_T), 1.0)


@triton.jit
def _word(high, low):
    """Two 32-bit numbers, the second not negative, as one 64-bit word, written and read atomically. Never 0."""
    high, low = high.to(tl.int32, bitcast=True).to(tl.int64), low.to(tl.int32, bitcast=True).to(tl.int64)
    return (high << 32) | (low & 0x7FFFFFFF) | THERE


@triton.jit
def _high(word):
    return (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _low(word):
    return word.to(tl.int32) & 0x7FFFFFFF


@triton.jit
def _seen(word):
    """A word, or 0 if it has not been written yet."""
    return tl.atomic_or(word, 0, sem="relaxed")


@triton.jit
def _awaited(word):
    found = _seen(word)
    while found == 0:
        found = _seen(word)
    return found


@triton.jit
def _row(logits, floors, row, place, there, l_row, l_place, l_token, f_row, f_place, FLOORS: tl.constexpr):
    """Address, stride and floor of the logits at a place; no floor is read unless `there`."""
    floor = 0.0
    if FLOORS:
        floor = tl.load(floors + row * f_row + place * f_place, mask=there, other=0.0)
    return logits + row * l_row + place.to(tl.int64) * l_place, l_token, floor


@triton.jit
def _logits(row, at, vocab, FLOORS: tl.constexpr):
    """The logits of these tokens; -inf below the floor and for tokens past the vocabulary."""
    x = tl.load(row[0] + at.to(tl.int64) * row[1], mask=at < vocab, other=-float("inf")).to(tl.float32)
    if FLOORS:
        x = tl.where(x < row[2], -float("inf"), x)
    return x


@triton.jit
def _cells(x, unit):
    """For each cell of a span: the largest logit, to base 2, and the sum of powers relative to it."""
    own = tl.reshape(x, (SPAN // STRETCH, CELLS, NEAR))
    tops = tl.max(tl.max(own, 2), 0) * unit
    # One fused operation: both terms are large if T is small.
    return tops, tl.sum(tl.sum(power(tl.fma(own, unit, -_finite(tops)[None, :, None])), 2), 0)


@triton.jit
def _share(x, temp):
    """A word for a span: the largest logit, to base 2, and the sum of powers relative to it."""
    tops, sums = _cells(x, _unit(temp))
    top = tl.max(tops, 0)
    return _word(top, tl.sum(sums * power(tops - _finite(top)), 0))


@triton.jit
def _read(p, q, span, spans, vocab, temp, shares, FLOORS: tl.constexpr):
    """Store a span's shares of p and q; at T = 0 the largest logit of p and its token instead."""
    at = span * SPAN + tl.arange(0, SPAN)
    if temp > 0:
        x, y = _logits(p, at, vocab, FLOORS), _logits(q, at, vocab, FLOORS)
        tl.store(shares + span, _share(x, temp))
        tl.store(shares + spans + span, _share(y, temp))
    else:
        top, token = tl.max(_logits(p, at, vocab, FLOORS), 0, return_indices=True)
        tl.store(shares + span, _word(top, span * SPAN + token))
        tl.store(shares + spans + span, NONE)


@triton.jit
def _whole(word):
    """All shares of a row -> the largest logit and the logarithm of the sum of powers (meaningless at T = 0)."""
    base = _high(word)
    top = tl.max(base, 0)
    return top, tl.log2(tl.sum(_low(word).to(tl.float32, bitcast=True) * tl.exp2(base - _finite(top)), 0))


@triton.jit
def _judge(p, q, token, key, spans, vocab, temp, shares, S: tl.constexpr, FLOORS: tl.constexpr):
    """Wait for a drafted token's shares and store the verdict after them, as two words: p's largest logit and the
    ratio of the sums of p and q; q's largest logit and whether the token is accepted.
    """
    px, qx = _logits(p, token, vocab, FLOORS), _logits(q, token, vocab, FLOORS)
    coin = tl.max(tl.log(uniform(key, tl.zeros([1], tl.int32))), 0) * LOG2E
    unit, span, waits = _unit(temp), tl.arange(0, S), tl.full([], 1, tl.int32)
    while waits > 0:
        p_word = tl.load(shares + span, mask=span < spans, other=NONE, volatile=True)
        q_word = tl.load(shares + spans + span, mask=span < spans, other=NONE, volatile=True)
        waits = tl.max(((p_word == 0) | (q_word == 0)).to(tl.int32), 0)
        if waits == 0:
            p_base, p_log = _whole(p_word)
            q_base, q_log = _whole(q_word)
            if temp > 0:
                # A difference of logarithms: where p = q it is 0, and no coin refuses.
                gap = (tl.fma(px, unit, -p_base) - p_log) - (tl.fma(qx, unit, -q_base) - q_log)
                hit = (coin < gap) & (qx > -float("inf"))
            else:
                hit = token == tl.min(tl.where(_high(p_word) == p_base, _low(p_word), 0x7FFFFFFF), 0)
            tl.store(shares + 2 * spans, _word(p_base, tl.exp2(p_log - q_log)))
            tl.store(shares + 2 * spans + 1, _word(q_base, tl.where(hit, ACCEPTED, REFUSED)))


@triton.jit
def _left(x, y, p_base, q_base, ratio, unit):
    """(p - q)+, in units of p's largest power."""
    return tl.maximum(tl.fma(power(tl.fma(y, unit, -q_base)), -ratio, power(tl.fma(x, unit, -p_base))), 0.0)


@triton.jit
def _best(score):
    """The largest score and its index; NaN counts as -inf."""
    return tl.max(tl.where(score > -float("inf"), score, -float("inf")), 0, return_indices=True)


@triton.jit
def _offer(p, q, span, vocab, rest, temp, key, p_base, q_base, ratio, FLOORS: tl.constexpr):
    """A word for a span's best cell in the draw: its score, and 2 · cell + 1 if (p - q)+ is empty in this span, so that
    the offer counts only if it is empty everywhere, else 2 · cell. At T = 0: the best logit and 2 · token.
    """
    at, top, won = span * SPAN + tl.arange(0, SPAN), tl.full([], -float("inf"), tl.float32), tl.zeros([], tl.int32)
    if temp > 0:
        noise = gumbel2(uniform(key, span * CELLS + tl.arange(0, CELLS) + CELL))
        if rest:
            x, y = _logits(p, at, vocab, FLOORS), _logits(q, at, vocab, FLOORS)
            left = tl.reshape(_left(x, y, p_base, q_base, ratio, _unit(temp)), (SPAN // STRETCH, CELLS, NEAR))
            top, won = _best(logarithm(tl.sum(tl.sum(left, 2), 0)) + noise)
        only = rest & (top == -float("inf"))
        if top == -float("inf"):  # after the last drafted token there is no q, and p needs no normalising
            tops, sums = _cells(_logits(p, at, vocab, FLOORS), _unit(temp))
            top, won = _best(tops + logarithm(sums) + noise)
        word = _word(top, (span * CELLS + won) * 2 + only.to(tl.int32))
    else:
        top, won = tl.max(_logits(p, at, vocab, FLOORS), 0, return_indices=True)
        word = _word(top, (span * SPAN + won) * 2)
    return word


@triton.jit
def _settle(p, q, spans, vocab, rest, temp, key, p_base, q_base, ratio, offers, S: tl.constexpr, FLOORS: tl.constexpr):
    """Wait for all offers and draw the token: one of the best cell."""
    other, waits = tl.arange(0, S), tl.full([], 1, tl.int32)
    token, some = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    while waits > 0:
        word = tl.load(offers + other, mask=other < spans, other=NONE + 1, volatile=True)
        waits = tl.max((word == 0).to(tl.int32), 0)
        if waits == 0:
            code = _low(word)
            some = tl.max(1 - (code & 1), 0)  # if (p - q)+ is not empty anywhere, only its offers count
            found = tl.where((code & 1) == 1 - some, _high(word), -float("inf"))
            token = tl.sum(tl.where(other == tl.argmax(found, 0), code >> 1, 0), 0)
    if temp > 0:  # `token` is a cell so far
        inner, unit = tl.arange(0, CELL), _unit(temp)
        at = token // CELLS * SPAN + token % CELLS * NEAR + inner // NEAR * STRETCH + inner % NEAR
        at = tl.where(at < 0, vocab, at)  # if the logits were NaN
        x = _logits(p, at, vocab, FLOORS)
        if rest & (some > 0):
            inside = logarithm(_left(x, _logits(q, at, vocab, FLOORS), p_base, q_base, ratio, unit))
        else:
            inside = x * unit
        inside += gumbel2(uniform(key, inner))
        token = tl.min(tl.where(inside == tl.max(inside, 0), at, 0x7FFFFFFF), 0)
    return tl.minimum(tl.maximum(token, 0), vocab - 1).to(tl.int64)


@triton.jit
def _places(
    target, draft, tokens, counts, temperature, seeds, positions, target_floor, draft_floor, words, out, accepted,
    batch, gamma, vocab, spans,
    t_row, t_place, t_token, d_row, d_place, d_token, k_row, k_place, tf_row, tf_place, df_row, df_place,
    ACCEPT: tl.constexpr, RESIDUAL: tl.constexpr, S: tl.constexpr, G: tl.constexpr, FLOORS: tl.constexpr,
):  # fmt: skip
    """Programs start in the order of their ids: place by place, row by row, one per span and then one more, which waits
    for the others of its place. If the drafted token before this place is accepted or not judged yet, they read and
    judge this place's token. If the one before is refused, they draw its replacement; if it was the row's last, they
    draw the token after it. S: at least the number of spans. G: at least the number of drafted tokens.
    """
    program = tl.program_id(0)
    span, line = program % (spans + 1), program // (spans + 1)
    row, place = (line % batch).to(tl.int64), line // batch
    temp, count = tl.load(temperature + row), tl.minimum(tl.load(counts + row), gamma).to(tl.int32)
    shares = words + (row * gamma + place) * (2 * spans + 2)
    before = tl.full([], THERE | ACCEPTED, tl.int64)
    if place > 0:
        before = _seen(shares - 1)
    if (span < spans) & (place < count) & ((before == 0) | (_low(before) == ACCEPTED)):
        p = _row(target, target_floor, row, place, True, t_row, t_place, t_token, tf_row, tf_place, FLOORS)
        q = _row(draft, draft_floor, row, place, True, d_row, d_place, d_token, df_row, df_place, FLOORS)
        _read(p, q, span, spans, vocab, temp, shares, FLOORS)
    if before == 0:
        before = _awaited(shares - 1)

    state, seed, position = _low(before), tl.load(seeds + row), tl.load(positions + row) + 1
    if (span == spans) & (place < gamma):
        if (state == ACCEPTED) & (place < count):
            p = _row(target, target_floor, row, place, True, t_row, t_place, t_token, tf_row, tf_place, FLOORS)
            q = _row(draft, draft_floor, row, place, True, d_row, d_place, d_token, df_row, df_place, FLOORS)
            token, key = tl.load(tokens + row * k_row + place * k_place), key_of(seed, position + place, ACCEPT)
            _judge(p, q, token, key, spans, vocab, temp, shares, S, FLOORS)
        else:
            tl.store(shares + 2 * spans + 1, THERE | OVER)
    if (state == REFUSED) | ((state == ACCEPTED) & (place == count)):
        n, rest = tl.where(state == REFUSED, place - 1, place), (state == REFUSED) & (temp > 0)
        p_base, ratio, q_base = tl.zeros([], tl.float32), tl.zeros([], tl.float32), _high(before)
        if rest:
            verdict = _awaited(shares - 2)
            p_base, ratio = _high(verdict), _low(verdict).to(tl.float32, bitcast=True)
        p = _row(target, target_floor, row, n, True, t_row, t_place, t_token, tf_row, tf_place, FLOORS)
        q = _row(draft, draft_floor, row, n, rest, d_row, d_place, d_token, df_row, df_place, FLOORS)
        offers, key = words + batch * gamma * (2 * spans + 2) + row * spans, key_of(seed, position + n, RESIDUAL)
        if span < spans:
            tl.store(offers + span, _offer(p, q, span, vocab, rest, temp, key, p_base, q_base, ratio, FLOORS))
        else:
            token = _settle(p, q, spans, vocab, rest, temp, key, p_base, q_base, ratio, offers, S, FLOORS)
            at, into = tl.arange(0, G), out + row * (gamma + 1)
            drafted = tl.load(tokens + row * k_row + at * k_place, mask=at < gamma, other=0)
            tl.store(accepted + row, n.to(tl.int64))
            tl.store(into + at, tl.where(at == n, token, drafted), mask=at < gamma)
            tl.store(into + gamma, token)


def fused(
    target: Tensor, draft: Tensor, tokens: Tensor, counts: Tensor, temperature: Tensor, seeds: Tensor,
    positions: Tensor, target_floor: Tensor | None, draft_floor: Tensor | None, streams: tuple[int, int],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See naive.py; place d uses the random numbers of position `positions` + 1 + d."""
    batch, gamma = tokens.shape
    vocab, device = target.shape[2], target.device
    spans = triton.cdiv(vocab, naive.SPAN)
    out, accepted = indices(batch, gamma + 1, device=device), indices(batch, device=device)
    # For each drafted token its shares of p and q and its verdict; then for each row the offers of its spans.
    words = torch.zeros(batch * (gamma * (2 * spans + 2) + spans), dtype=torch.long, device=device)
    floors = target_floor is not None and draft_floor is not None
    of_floors = target_floor.stride() + draft_floor.stride() if floors else (0,) * 4
    submit(
        _places, ((gamma + 1) * batch * (spans + 1),),
        target, draft, tokens, counts, temperature, seeds, positions, target_floor, draft_floor, words, out, accepted,
        batch, gamma, vocab, spans, *target.stride(), *draft.stride(), *tokens.stride(), *of_floors,
        ACCEPT=streams[0], RESIDUAL=streams[1], S=max(WIDE.value, triton.next_power_of_2(spans)),
        G=triton.next_power_of_2(max(gamma, 1)), FLOORS=floors, num_warps=4,
    )  # fmt: skip
    return out, accepted
