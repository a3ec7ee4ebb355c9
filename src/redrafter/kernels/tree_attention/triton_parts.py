"""What the kernels of tree attention share: queries, parts of the older keys, the newest keys, running softmaxes."""

import triton
import triton.language as tl

from redrafter.kernels.launch import wait_for_previous
from redrafter.kernels.tree_attention.triton_lines import COLUMNS, INDEX, NEWEST, PLACE, SLOTS, WINDOW


@triton.jit
def queries_of(lines, first_line, count, at, groups):
    """Queries `at` of a run, group by group and line by line: whether they are real, their groups and lines, how many
    tokens come before them, and their windows."""
    real = at < groups * count
    group, line = at // count, first_line + at % count
    about = lines + line.to(tl.int64) * COLUMNS
    index = tl.load(about + INDEX, mask=real, other=0).to(tl.int32)
    window = tl.minimum(tl.load(about + WINDOW, mask=real, other=1), 1 << 30).to(tl.int32)
    return real, group, line, index, window


@triton.jit
def border_of(index, real):
    """Keys before the border are older ones."""
    return tl.where(real, tl.maximum(index + 1 - NEWEST, 0), 0)


@triton.jit
def start_of(part):
    """The first slot of a part: parts of 128 slots, from 512 on of 512, from 4,096 of 1,024, from 16,384 of 4,096."""
    far = tl.where(part < 23, (part - 7) * 1024, (part - 19) * 4096)
    return tl.where(part < 4, part * 128, tl.where(part < 11, (part - 3) * 512, far))


@triton.jit
def count_parts(length):
    """How many parts begin before this slot."""
    far = tl.where(length <= 16384, 7 + tl.cdiv(length, 1024), 19 + tl.cdiv(length, 4096))
    return tl.where(length <= 512, tl.cdiv(length, 128), tl.where(length <= 4096, 3 + tl.cdiv(length, 512), far))


def parts_of(length: int) -> int:
    """`count_parts` on the host.

    >>> [parts_of(n) for n in (1, 128, 129, 512, 513, 4096, 4097, 16384, 16385, 131072)]
    [1, 1, 2, 4, 5, 11, 12, 23, 24, 51]
    """
    for limit, before, size in ((512, 0, 128), (4096, 3, 512), (16384, 7, 1024)):
        if length <= limit:
            return before - -length // size
    return 19 - -length // 4096


@triton.jit
def add(peak, total, acc, new_peak, new_total, new_acc):
    """Add one running softmax to another: the largest score, the sum of weights, the weighted sum of values."""
    higher = tl.maximum(peak, new_peak)
    base = tl.where(higher == -float("inf"), 0.0, higher)
    fade, weight = tl.exp2(peak - base), tl.exp2(new_peak - base)
    total = tl.fma(total, fade, new_total * weight)
    acc = tl.fma(acc, tl.broadcast_to(fade[:, None], acc.shape), new_acc * weight[:, None])
    return higher, total, acc


@triton.jit
def older(
    q, keys, values, border, first, lowest, highest, part, scale, c_slot, size,
    M: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One part of the keys before the queries' borders."""
    d = tl.arange(0, D)
    ones = tl.full([BLOCK, 16], 1.0, q.dtype)
    peak = tl.full([M], -float("inf"), tl.float32)
    totals = tl.zeros([M, 16], tl.float32)  # the weights' sum, in 16 equal columns
    acc = tl.zeros([M, D], tl.float32)
    for start in range(tl.maximum(start_of(part), lowest), tl.minimum(start_of(part + 1), highest), BLOCK):
        slot = start + tl.arange(0, BLOCK)
        here = (slot < highest)[:, None] & (d < size)[None, :]
        k = tl.load(keys + slot[:, None] * c_slot + d[None, :], mask=here, other=0.0)
        v = tl.load(values + slot[:, None] * c_slot + d[None, :], mask=here, other=0.0)
        seen = (slot[None, :] < border[:, None]) & (slot[None, :] >= first[:, None])
        score = tl.where(seen, tl.dot(q, tl.trans(k), input_precision=PRECISION), -float("inf"))
        higher = tl.maximum(peak, tl.max(score, 1) * scale)
        base = tl.where(higher == -float("inf"), 0.0, higher)
        weight = tl.exp2(tl.fma(score, tl.full([M, BLOCK], scale, tl.float32), -base[:, None])).to(v.dtype)
        fade = tl.exp2(peak - base)
        totals = tl.dot(weight, ones, totals * fade[:, None], input_precision=PRECISION)
        acc = tl.dot(weight, v, acc * fade[:, None], input_precision=PRECISION)
        peak = higher
    return peak, tl.max(totals, 1), acc


@triton.jit
def store(peaks, totals, sums, at, peak, total, acc, d, size, real):
    """Leave a running softmax for the merge."""
    tl.store(peaks + at, peak, mask=real)
    tl.store(totals + at, total, mask=real)
    tl.store(sums + at[:, None] * size + d[None, :], acc, mask=real[:, None] & (d < size)[None, :])


@triton.jit
def stored(peaks, totals, sums, at, d, size, there):
    """What `store` left, or a softmax over nothing."""
    peak = tl.load(peaks + at, mask=there, other=-float("inf"), cache_modifier=".cg")
    total = tl.load(totals + at, mask=there, other=0.0, cache_modifier=".cg")
    mask = there[:, None] & (d < size)[None, :]
    return peak, total, tl.load(sums + at[:, None] * size + d[None, :], mask=mask, other=0.0, cache_modifier=".cg")


@triton.jit
def newest(
    query, keys, values, lines, line, real, window, scale, c_row, c_slot, size,
    D: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The newest keys, gathered for each query from the slots in its line."""
    d = tl.arange(0, D)[None, None, :]
    i = tl.arange(0, NEWEST)[None, :]
    about = lines + line.to(tl.int64) * COLUMNS
    near = real[:, None] & (NEWEST - i <= window[:, None])
    slot = tl.load(about[:, None] + SLOTS + i, mask=near, other=-1).to(tl.int32)
    row = tl.load(about + PLACE, mask=real, other=0) * c_row
    seen = slot >= 0
    here = seen[:, :, None] & (d < size)
    at = row[:, None, None] + slot[:, :, None] * c_slot + d
    wait_for_previous(EARLY)  # only now: the lines are older than the kernel before this one
    k = tl.load(keys + at, mask=here, other=0.0)
    v = tl.load(values + at, mask=here, other=0.0)
    q = tl.load(query[:, None, None] + d, mask=real[:, None, None] & (d < size), other=0.0)
    score = tl.where(seen, tl.sum(q.to(tl.float32) * k.to(tl.float32), 2) * scale, -float("inf"))
    peak = tl.max(score, 1)
    base = tl.where(peak == -float("inf"), 0.0, peak)
    weight = tl.exp2(score - base[:, None]).to(v.dtype).to(tl.float32)
    return peak, tl.sum(weight, 1), tl.sum(weight[:, :, None] * v.to(tl.float32), 1)


@triton.jit
def parts_between(
    q, keys, values, border, first, lowest, highest, begin, end, scale, c_slot, size,
    M: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Parts `begin` to `end`, added up in their order."""
    peak = tl.full([M], -float("inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    for part in range(begin, end):
        new_peak, new_total, new_acc = older(
            q, keys, values, border, first, lowest, highest, part, scale, c_slot, size, M, BLOCK, D, PRECISION
        )
        peak, total, acc = add(peak, total, acc, new_peak, new_total, new_acc)
    return peak, total, acc


@triton.jit
def merged(
    peaks, totals, sums, into, each, at, border, last, d, size, real,
    M: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """All parts of M queries in their order, then the newest keys (part `last`): the weighted mean of values."""
    last_peak, last_total, last_acc = stored(peaks, totals, sums, (into + last) * each + at, d, size, real)
    peak = tl.full([M], -float("inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    parts = count_parts(border)
    for i in range(
        0, tl.max(parts, 0), 2
    ):  # two at once: a compiler does not move the second's loads before the first's sums
        here = (into + i) * each + at
        peak_0, total_0, acc_0 = stored(peaks, totals, sums, here, d, size, i < parts)
        peak_1, total_1, acc_1 = stored(peaks, totals, sums, here + each, d, size, i + 1 < parts)
        peak, total, acc = add(peak, total, acc, peak_0, total_0, acc_0)
        peak, total, acc = add(peak, total, acc, peak_1, total_1, acc_1)
    peak, total, acc = add(peak, total, acc, last_peak, last_total, last_acc)
    return mean(total, acc)


@triton.jit
def mean(total, acc):
    """The weighted mean of values; 0 for a query that sees nothing."""
    return acc / tl.where(total > 0, total, 1.0)[:, None]
