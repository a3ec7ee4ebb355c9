"""Randomness as a function of (seed, stream, position, token): no state, recomputable anywhere.

The generator is splitmix64 used as a counter-based hash, as in redrafter's core: the same seed gives the same numbers
in torch and in MLX. Each (seed, stream, position) gives a 64-bit key; token v takes the v-th output of the sequence
that starts there.
"""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

SEEDED = 0
"""The stream of the target's choice."""


def _uint64(value: int) -> mx.array:
    return mx.array(np.uint64(value & (2**64 - 1)))


_GOLDEN = _uint64(0x9E3779B97F4A7C15)
_MIX_1 = _uint64(0xBF58476D1CE4E5B9)
_MIX_2 = _uint64(0x94D049BB133111EB)


def _mix(z: mx.array) -> mx.array:
    z = (z ^ (z >> 30)) * _MIX_1
    z = (z ^ (z >> 27)) * _MIX_2
    return z ^ (z >> 31)


def as_seeds(seeds: Sequence[int]) -> mx.array:
    """Any integers -> (B,) the 64 bits of each."""
    return mx.array(np.array([s & (2**64 - 1) for s in seeds], dtype=np.uint64))


def _key(seeds: mx.array, stream: int, positions: mx.array) -> mx.array:
    """(B,) seeds and (B, n) positions -> (B, n) keys."""
    row = _mix(_mix(seeds + _GOLDEN) + _uint64(0x9E3779B97F4A7C15 * (stream + 1)))
    return _mix(row[:, None] + (positions.astype(mx.uint64) + 1) * _GOLDEN)


def bits(seeds: mx.array, positions: mx.array, count: int, stream: int = SEEDED) -> mx.array:
    """(B,) seeds, (B, n) positions -> (B, n, count) random integers of 53 bits."""
    token = mx.arange(1, count + 1).astype(mx.uint64)
    return _mix(_key(seeds, stream, positions)[..., None] + token * _GOLDEN) >> 11


def uniform(seeds: mx.array, positions: mx.array, count: int, stream: int = SEEDED) -> mx.array:
    """(B,) seeds, (B, n) positions -> (B, n, count) fp32 numbers in (0, 1)."""
    drawn = (bits(seeds, positions, count, stream).astype(mx.float32) + 0.5) * 2.0**-53
    return mx.minimum(drawn, 1 - 2.0**-24)


def gumbel(seeds: mx.array, positions: mx.array, count: int, stream: int = SEEDED) -> mx.array:
    """(B,) seeds, (B, n) positions -> (B, n, count) standard Gumbel noise in fp32.

    An argmax depends on the upper tail, where -log(-log1p(-u)) with a small u is accurate and -log(-log(u)) is not.
    """
    return -mx.log(-mx.log1p(-uniform(seeds, positions, count, stream)))
