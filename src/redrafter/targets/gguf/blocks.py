"""The exact way from each GGUF tensor type to the matrices that the CPU kernels take.

Every quantised type has the form `scale * (value - zero) + minimum` with 4 or 8 bits, and gives the same fp32 weights
bit for bit: a product of an fp16 number and a few bits is exact in fp32.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from redrafter.kernels.cpu.matrices import Floats, Matrix, Quantised
from redrafter.targets.gguf.file import Tensor

Array = np.ndarray[Any, Any]


def read(tensor: Tensor) -> Matrix:
    """A tensor of a file as a matrix; a vector has one axis."""
    if tensor.layout.values == 1:
        kind = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}[tensor.layout.name]
        return Floats(tensor.data.view(kind).reshape(tensor.shape))
    rows, columns = len(tensor.data), tensor.shape[-1]
    blocks = tensor.data.reshape(-1, tensor.layout.size)
    made = READERS[tensor.layout.name](blocks)
    minimums = None if made.minimums is None else made.minimums.reshape(rows, -1)
    return replace(
        made, values=made.values.reshape(rows, columns), scales=made.scales.reshape(rows, -1), minimums=minimums
    )


def _halves(blocks: Array, at: int) -> Array:
    """The fp16 number at a byte of every block, as a column."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16)


def _nibbles(packed: Array) -> Array:
    """(n, bytes) -> (n, 2 · bytes): the low halves of all bytes, then the high halves."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _fifth_bits(packed: Array) -> Array:
    """Four bytes of each block hold one bit for each of its 32 values -> (n, 32) of 0 or 16."""
    return np.unpackbits(packed, axis=1, bitorder="little") << 4


def _q4_0(blocks: Array) -> Quantised:
    return Quantised(4, _nibbles(blocks[:, 2:]), _halves(blocks, 0), zero=8)


def _q4_1(blocks: Array) -> Quantised:
    return Quantised(4, _nibbles(blocks[:, 4:]), _halves(blocks, 0), _halves(blocks, 2))


def _q5_0(blocks: Array) -> Quantised:
    values = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return Quantised(8, values.view(np.int8) - np.int8(16), _halves(blocks, 0))


def _q5_1(blocks: Array) -> Quantised:
    values = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return Quantised(8, values.view(np.int8), _halves(blocks, 0), _halves(blocks, 2))


def _q8_0(blocks: Array) -> Quantised:
    return Quantised(8, blocks[:, 2:].view(np.int8), _halves(blocks, 0))


NONLINEAR = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
"""What the 16 values of IQ4_NL stand for."""
TINY_FLOATS = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""What those of MXFP4 stand for, in halves: floats with a sign, two bits of exponent and one of mantissa."""


def _iq4_nl(blocks: Array) -> Quantised:
    return Quantised(8, NONLINEAR[_nibbles(blocks[:, 2:])], _halves(blocks, 0))


def _mxfp4(blocks: Array) -> Quantised:
    """A byte e scales a block by 2^(e - 127). fp16 holds most scales, and takes half as many bytes as fp32."""
    exponents = blocks[:, :1].astype(np.int32) - 128  # of halves
    values, scales = TINY_FLOATS[_nibbles(blocks[:, 1:])], np.ldexp(np.float32(1), exponents)
    if ((exponents >= -24) & (exponents <= 15)).all():
        return Quantised(8, values, scales.astype(np.float16))
    return Quantised(8, values, scales.repeat(2, axis=1))  # the kernels' groups with a scale in fp32 have 16 values


def _k_scales(blocks: Array) -> tuple[Array, Array]:
    """Scales and minimums (n, 8) of the eight groups in blocks of Q4_K and Q5_K, in fp32.

    Each is an fp16 number of the block times six bits of its own. The 12 bytes hold: the low six bits of scales 0-3 and
    of minimums 0-3, whose top two bits belong to groups 4-7, and then four low bits of scales and minimums 4-7.
    """
    first, second, last = np.split(blocks[:, 4:16], 3, axis=1)
    scales = np.concatenate([first & 63, (last & 15) | (first >> 6 << 4)], axis=1)
    minimums = np.concatenate([second & 63, (last >> 4) | (second >> 6 << 4)], axis=1)
    by, below = (_halves(blocks, at).astype(np.float32) for at in (0, 2))
    return by * scales.astype(np.float32), -(below * minimums.astype(np.float32))


def _k_nibbles(packed: Array) -> Array:
    """(n, 128) -> (n, 256): each run of 32 bytes holds 32 values in its low halves, then 32 in its high halves."""
    runs = packed.reshape(-1, 4, 1, 32)
    return np.concatenate([runs & 15, runs >> 4], axis=2).reshape(-1, 256)


def _q4_k(blocks: Array) -> Quantised:
    return Quantised(4, _k_nibbles(blocks[:, 16:]), *_k_scales(blocks))


def _q5_k(blocks: Array) -> Quantised:
    bits = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1  # (n, group, 32)
    values = _k_nibbles(blocks[:, 48:]) | (bits.reshape(-1, 256) << 4)
    return Quantised(8, values.view(np.int8), *_k_scales(blocks))


def _q6_k(blocks: Array) -> Quantised:
    packed = blocks[:, :128].reshape(-1, 2, 64)
    low = np.concatenate([packed & 15, packed >> 4], axis=2).reshape(-1, 2, 4, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    values = (low | high << 4).reshape(-1, 256).view(np.int8) - np.int8(32)
    scales = _halves(blocks, 208).astype(np.float32) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return Quantised(8, values, scales)


READERS: dict[str, Callable[[Array], Quantised]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "MXFP4": _mxfp4,
}
