"""Randomness as a function of (seed, stream, position, token): no state, recomputable anywhere.

The generator is splitmix64 used as a counter-based hash. Each (seed, stream, position) gives a 64-bit key; token v
takes the v-th output of the sequence that starts there. (The residual of `rejection` numbers cells of tokens, and
places in a cell, instead of tokens: see kernels/verify/naive.py.) Integers wrap, so CPU and GPU agree bit for bit up to
the final logarithm.

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


ALONE, FEW = 2048, 1 << 20
"""Numbers whose logarithms torch computes in one thread on a CPU, and numbers for which others are not worth waking."""

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
    made = uniform(seeds, positions, count, stream=stream, dtype=dtype)
    few = made.device.type == "cpu" and made.numel() <= FEW and made.is_contiguous()
    whole = not few or torch.compiler.is_compiling()
    for u in (made,) if whole else torch.split(made.view(-1), ALONE):
        u.neg_().log1p_().neg_().log_().neg_()  # in place: new memory takes a CPU longer than a logarithm
    return made
