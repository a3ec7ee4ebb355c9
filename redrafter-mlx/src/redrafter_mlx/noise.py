"""Randomness as a function of (seed, position, token): no state, recomputable anywhere.

The generator is splitmix64 used as a counter-based hash, as in redrafter's core: the same seed gives the same numbers
in torch and in MLX. Each (seed, position) gives a 64-bit key; token v takes the v-th output of the sequence that starts
there.
"""

from collections.abc import Sequence
from functools import partial

import mlx.core as mx
import numpy as np


def as_seeds(seeds: Sequence[int]) -> mx.array:
    """Any integers -> (B,) the 64 bits of each."""
    return mx.array(np.array([s & (2**64 - 1) for s in seeds], dtype=np.uint64))


_GOLDEN, _MIX_1, _MIX_2 = (mx.array(np.uint64(x)) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _mix(z: mx.array) -> mx.array:
    z = (z ^ (z >> 30)) * _MIX_1
    z = (z ^ (z >> 27)) * _MIX_2
    return z ^ (z >> 31)


def counters(seeds: mx.array, positions: mx.array, count: int) -> mx.array:
    """(B,) seeds, (B, n) positions -> (B, n, count) where each token's number starts from."""
    row = _mix(_mix(seeds + _GOLDEN) + _GOLDEN)  # redrafter's first stream, which the target's choices are drawn from
    key = _mix(row[:, None] + (positions.astype(mx.uint64) + 1) * _GOLDEN)
    return key[..., None] + mx.arange(1, count + 1).astype(mx.uint64) * _GOLDEN


def bits(counters: mx.array) -> mx.array:
    """Random integers of 53 bits."""
    return _mix(counters) >> 11


def uniform(counters: mx.array) -> mx.array:
    """fp32 numbers in (0, 1)."""
    return mx.minimum((bits(counters).astype(mx.float32) + 0.5) * 2.0**-53, 1 - 2.0**-24)


@partial(mx.compile, shapeless=True)
def _gumbel(counters: mx.array) -> mx.array:
    return -mx.log(-mx.log1p(-uniform(counters)))


def gumbel(seeds: mx.array, positions: mx.array, count: int) -> mx.array:
    """(B,) seeds, (B, n) positions -> (B, n, count) standard Gumbel noise in fp32.

    An argmax depends on the upper tail, where -log(-log1p(-u)) with a small u is accurate and -log(-log(u)) is not.
    """
    return _gumbel(counters(seeds, positions, count))
