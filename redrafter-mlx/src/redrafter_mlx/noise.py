"""Randomness as a function of (seed, stream, position, token): no state, recomputable anywhere.

The generator is splitmix64 used as a counter-based hash, as in redrafter's core: the same seed gives the same numbers
in torch and in MLX. Each (seed, stream, position) gives a 64-bit key; token v takes the v-th output of the sequence
that starts there.
"""

from collections.abc import Sequence
from functools import partial

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


def _counters(seeds: mx.array, positions: mx.array, count: int, stream: int) -> mx.array:
    """(B, n, count) where each token's number starts from."""
    token = mx.arange(1, count + 1).astype(mx.uint64)
    return _key(seeds, stream, positions)[..., None] + token * _GOLDEN


def _bits(counters: mx.array) -> mx.array:
    return _mix(counters) >> 11


def _uniform(counters: mx.array) -> mx.array:
    return mx.minimum((_bits(counters).astype(mx.float32) + 0.5) * 2.0**-53, 1 - 2.0**-24)


@partial(mx.compile, shapeless=True)
def _gumbel(counters: mx.array) -> mx.array:
    return -mx.log(-mx.log1p(-_uniform(counters)))


def bits(seeds: mx.array, positions: mx.array, count: int, stream: int = SEEDED) -> mx.array:
    """(B,) seeds, (B, n) positions -> (B, n, count) random integers of 53 bits."""
    return _bits(_counters(seeds, positions, count, stream))


def uniform(seeds: mx.array, positions: mx.array, count: int, stream: int = SEEDED) -> mx.array:
    """(B,) seeds, (B, n) positions -> (B, n, count) fp32 numbers in (0, 1)."""
    return _uniform(_counters(seeds, positions, count, stream))


def gumbel(seeds: mx.array, positions: mx.array, count: int, stream: int = SEEDED) -> mx.array:
    """(B,) seeds, (B, n) positions -> (B, n, count) standard Gumbel noise in fp32.

    An argmax depends on the upper tail, where -log(-log1p(-u)) with a small u is accurate and -log(-log(u)) is not.
    """
    return _gumbel(_counters(seeds, positions, count, stream))
