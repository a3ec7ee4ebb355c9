"""Randomness as a function of (seed, stream, position, token): no state, recomputable anywhere.

The generator is splitmix64 used as a counter-based hash. Each (seed, stream, position) gives a 64-bit key; token v
takes the v-th output of the sequence that starts there. (The residual of `rejection` numbers cells of tokens, and
places in a cell, instead of tokens: see kernels/verify/naive.py.) Integers wrap, so CPU and GPU agree bit for bit up to
the final logarithm. On CPUs all bits agree, with the C++ functions and without.

kernels/verify/noise.py computes the same numbers in Triton; on a GPU all Gumbel noise comes from there. Change both
files together; tests/kernels/test_verify.py and test_verify_seeded.py compare them.
"""

import operator

import torch
from torch import Tensor

from redrafter.kernels import runs_cpp, runs_triton, verify
from redrafter.kernels.cpu import ops

SEEDED, DRAFT, ACCEPT, RESIDUAL = range(4)
"""Independent streams: the target's choice; and, for `rejection`, drafting, accepting and the residual."""


def as_int64(value: int) -> int:
    """The int64 with the same 64 bits."""
    value = operator.index(value) & (2**64 - 1)  # numpy's integers have 64 bits
    return value - 2**64 if value >= 2**63 else value


GOLDEN = as_int64(0x9E3779B97F4A7C15)
_MIX_1 = as_int64(0xBF58476D1CE4E5B9)
_MIX_2 = as_int64(0x94D049BB133111EB)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64 (`>>` alone would copy the sign bit)."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def mix(z: Tensor) -> Tensor:
    """The scrambling of splitmix64: int64 -> int64, one to one."""
    z = (z ^ _shift(z, 30)) * _MIX_1
    z = (z ^ _shift(z, 27)) * _MIX_2
    return z ^ _shift(z, 31)


def _key(seeds: Tensor, stream: int, positions: Tensor) -> Tensor:
    """(B,) seeds and (B, n) positions -> (B, n) keys."""
    row = mix(mix(seeds + GOLDEN) + as_int64(GOLDEN * (stream + 1)))
    return mix(row[:, None] + (positions + 1) * GOLDEN)


def fold(seed: int, index: int) -> int:
    """The seed of the index-th of several choices for one request; choice 0 keeps the seed itself.

    >>> fold(7, 0), fold(7, 1) != fold(7, 2)
    (7, True)
    """
    if index == 0:
        return seed
    return int(mix(mix(torch.tensor(as_int64(seed))) + as_int64(index * GOLDEN)))


LOG_SERIES = (
    7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1,
    -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
)  # fmt: skip
"""Of the logarithm: coefficients of the polynomial that Cephes uses, the highest first."""

_OFFSETS: dict[tuple[int, torch.device], Tensor] = {}


def _offsets(count: int, device: torch.device) -> Tensor:
    """(count,) what token v adds to a key. Cached, because a compiled function would compute it with 32 bits."""
    if (count, device) not in _OFFSETS:
        _OFFSETS[count, device] = torch.arange(1, count + 1, device=device) * GOLDEN
    return _OFFSETS[count, device]


def uniform(
    seeds: Tensor,
    positions: Tensor,
    count: int,
    *,
    stream: int,
    dtype: torch.dtype,
) -> Tensor:
    """(B,) seeds, (B, n) positions -> (B, n, count) numbers in (0, 1)."""
    keys = _key(seeds, stream, positions)  # (B, n)
    if dtype == torch.float32 and runs_cpp(keys.device) and not torch.compiler.is_compiling():
        return ops.uniform(keys, count)  # the same bits in a tenth of the time
    bits = _shift(mix(keys[..., None] + _offsets(count, keys.device)), 11)  # (B, n, count), 53 bits
    return ((bits.to(dtype) + 0.5) * 2.0**-53).clamp(max=1 - torch.finfo(dtype).eps / 2)


def gumbel(
    seeds: Tensor,
    positions: Tensor,
    count: int,
    *,
    stream: int,
    dtype: torch.dtype,
) -> Tensor:
    """(B,) seeds, (B, n) positions -> (B, n, count) standard Gumbel noise.

    An argmax depends on the upper tail, where -log(-log1p(-u)) with a small u is accurate and -log(-log(u)) is not.

    >>> seeds, where = torch.tensor([3]), torch.tensor([[10, 11]])
    >>> both = gumbel(seeds, where, 5, stream=SEEDED, dtype=torch.float64)
    >>> one = gumbel(seeds, where[:, 1:], 5, stream=SEEDED, dtype=torch.float64)
    >>> bool((both[:, 1:] == one).all())
    True
    """
    if dtype == torch.float32 and runs_triton(seeds.device):  # the numbers with which the kernels choose
        found: Tensor = verify.gumbel(seeds, positions, count, stream)
        return found
    if dtype == torch.float32 and runs_cpp(seeds.device) and not torch.compiler.is_compiling():
        return ops.gumbel(_key(seeds, stream, positions), count)
    made = uniform(seeds, positions, count, stream=stream, dtype=dtype)
    if dtype != torch.float32:
        return made.neg_().log1p_().neg_().log_().neg_()
    kept = 1 - made
    lost = 1 - kept
    tiny = (lost == 0).to(dtype)  # where 1 - u is 1, -log1p(-u) is u
    return -_log(tiny * made - _log(kept) * (made / (lost + tiny)))


def _log(x: Tensor) -> Tensor:
    """log(x) of normal fp32 numbers above 0: kernels/cpu/step.cpp makes the same bits in a fraction of the time."""
    bits = x.view(torch.int32)
    mantissa = bits & 0x7FFFFF
    over = (mantissa > 0x3504F3).int()  # above sqrt(2)
    exponent = ((bits >> 23) - 127 + over).to(x.dtype)
    f = (mantissa | ((127 - over) << 23)).view(x.dtype) - 1
    z, y = f * f, torch.full_like(f, LOG_SERIES[0])
    for factor in LOG_SERIES[1:]:
        y = y * f + factor
    y = y * f * z - 2.12194440e-4 * exponent - 0.5 * z
    return f + y + 0.693359375 * exponent
