"""Packed matrices against numpy, for every format and every set of instructions that this CPU has."""

import numpy as np
import pytest
import torch

from redrafter.kernels.cpu import library, ops
from redrafter.kernels.cpu.matrices import Floats, Quantised, quantise
from redrafter.kernels.cpu.packed import PackedMatrix, format_of, whole
from redrafter.kernels.cpu.packed import quantise as packed_quantise
from tests.helpers import cpu_results

pytestmark = [
    pytest.mark.skipif(library.library() is None, reason="no C++ compiler here"),
    pytest.mark.usefixtures("lib"),
]

ROWS, COLUMNS = 37, 96


def matrices():
    """One random matrix of every format, in the order of FORMATS."""
    return cpu_results.matrices(ROWS, COLUMNS, np.random.default_rng(0))


def test_every_format():
    for index, matrix in enumerate(matrices()):
        assert format_of(matrix) == index
        packed, weights = PackedMatrix(matrix), matrix.dequantise()
        some = torch.tensor([[0, 36], [17, 16]])
        assert np.array_equal(packed.take(some).numpy().view(np.uint32), weights[some.numpy()].view(np.uint32))
        x = torch.randn(19, COLUMNS)
        made, wanted = packed.multiply(x), x.double() @ torch.from_numpy(weights).double().T
        assert float((made - wanted).abs().max() / wanted.abs().max()) < 1e-6, library.FORMATS[index]


def test_what_lies_at_an_odd_byte_is_copied():
    """Where safetensors files end their header, and so begin their tensors, is up to them."""
    odd = torch.frombuffer(bytearray(range(1, 14)), dtype=torch.float32, offset=1)
    assert ops.readable(odd.clone())
    assert not ops.readable(odd)
    for array, copied in ((odd.numpy(), True), (odd.clone().numpy(), False)):
        made = whole(array)
        assert made.flags.aligned
        assert np.array_equal(made, array)
        assert (made is not array) == copied


def test_a_token_alone_and_among_others_is_the_same_bit_for_bit():
    for matrix in matrices():
        packed, x = PackedMatrix(matrix), torch.randn(19, COLUMNS)
        alone = torch.cat([packed.multiply(row[None]) for row in x])
        for n in (2, 3, 4, 5, 7, 8, 9, 19):
            assert torch.equal(packed.multiply(x[:n]), alone[:n])


def seen_in_8_bits(x):
    """Each 32 inputs of a token as bytes with one scale."""
    tiles = x.reshape(len(x), -1, 32)
    scales = np.abs(tiles).max(2, keepdims=True) / np.float32(127)
    return (np.rint(tiles / np.where(scales == 0, 1, scales)) * scales).reshape(x.shape)


def seen_in_16_bits(x):
    """Each 32 inputs of a token as integers up to 32639 with one scale, a power of two."""
    tiles = x.reshape(len(x), -1, 32).astype(np.float64)
    most = np.abs(tiles).max(2, keepdims=True)
    scales = 2.0 ** (np.frexp(most)[1] - 15)
    scales = np.where(np.rint(most / scales) > 32639, 2 * scales, scales)
    return np.where(most < 2.0**-80, 0, np.rint(tiles / scales) * scales).reshape(x.shape)


SEEN = {8: seen_in_8_bits, 16: seen_in_16_bits}


def test_rounded_activations():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((19, COLUMNS)).astype(np.float32) * 10.0 ** rng.integers(-3, 3, (19, 1)).astype(np.float32)
    x[3, :32] = 0
    given = torch.from_numpy(x)
    for index, matrix in enumerate(matrices()):
        packed, weights = PackedMatrix(matrix), matrix.dequantise().astype(np.float64)
        exact = packed.multiply(given)
        for bits, other in ((8, 1e-4), (16, 5e-6)):
            made = packed.multiply(given, bits=bits)
            if isinstance(matrix, Floats):
                assert torch.equal(made, exact), "floats take the activations as they are"
                continue
            wanted = SEEN[bits](x).astype(np.float64) @ weights.T
            sizes = np.abs(wanted).max(1, keepdims=True)
            assert float((np.abs(made.numpy() - wanted) / sizes).max()) < 2e-6, library.FORMATS[index]
            assert float((np.abs(exact.numpy() - wanted) / sizes).max()) > other, "twin: unrounded"
            alone = torch.cat([packed.multiply(row[None], bits=bits) for row in given])
            for n in (2, 3, 4, 5, 7, 8, 19):
                assert torch.equal(packed.multiply(given[:n], bits=bits), alone[:n])


@pytest.mark.parametrize(("bits", "most", "usual"), [(8, 127, 127), (16, 32639, 100)])
def test_rounded_activations_are_the_same_for_every_set_of_instructions(bits, most, usual):
    """Where every number has few bits, no sum is rounded and the result is exact. Weights reach -128, inputs `most`."""
    rng = np.random.default_rng(0)
    x = rng.integers(-usual, usual + 1, (9, COLUMNS)).astype(np.float32)
    x[0], x[1] = usual, -usual
    x[:, ::32] = most  # the scale of each 32 inputs is 1
    eighths = 8 if bits == 8 else 1
    for index, matrix in enumerate(matrices()[:7]):
        values = matrix.values.copy()
        values[0], values[1] = values.max(), values.min()
        scales = (rng.integers(1, 1 + eighths, matrix.scales.shape) / eighths).astype(matrix.scales.dtype)
        least = (rng.integers(-8, 8, scales.shape) / eighths).astype(scales.dtype)
        plain = Quantised(matrix.bits, values, scales, None if matrix.minimums is None else least, matrix.zero)
        made = PackedMatrix(plain).multiply(torch.from_numpy(x), bits=bits)
        wanted = x.astype(np.float64) @ plain.dequantise().astype(np.float64).T
        assert np.array_equal(made.numpy(), wanted), library.FORMATS[index]


def without_low_digits(x):
    """Each number rounded to a multiple of 256 of its group's units, of which an activation of 16 bits is made."""
    tiles = x.reshape(len(x), -1, 32).astype(np.float64)
    units = 2.0 ** (np.frexp(np.abs(tiles).max(2, keepdims=True))[1] - 7)
    return (np.rint(tiles / units) * units).reshape(x.shape).astype(np.float32)


def test_blocks_of_tokens_give_the_bits_of_a_token_alone(monkeypatch):
    """Around the sizes of AMX's tiles and blocks, with an odd number of outputs and of groups, and several threads."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((130, COLUMNS)) * 10.0 ** rng.integers(-3, 3, (130, COLUMNS // 32)).repeat(32, axis=1)
    x[0, :32], x[1, :32], x[2, 5], x[40, 40], x[-1] = 0, 1e-30, np.nan, np.inf, 1e-20
    x[3], x[4] = 32639, -65535
    given, coarse = torch.from_numpy(x.astype(np.float32)), torch.from_numpy(without_low_digits(x[5:40]))
    monkeypatch.setattr("redrafter.kernels.cpu.packed.thread_count", lambda: 3)
    for matrix in matrices():
        packed = PackedMatrix(matrix)
        alone = torch.cat([packed.multiply(row[None], bits=16) for row in given]).view(torch.int32)
        for n in (9, 12, 15, 16, 17, 31, 33, 63, 64, 65, 129, 130):
            assert torch.equal(packed.multiply(given[:n], bits=16).view(torch.int32), alone[:n])
        rounded = packed.multiply(coarse, bits=16).view(torch.int32)
        assert (rounded != alone[5:40]).float().mean() > 0.9, "twin: the low digit is dropped"


def test_no_sum_of_16_bit_activations_is_too_large():
    """All weights and activations at their ends, and activations where a scale passes to the next power of two."""
    for matrix in matrices()[:7]:
        plain = Quantised(matrix.bits, matrix.values.copy(), np.ones_like(matrix.scales), matrix.minimums, matrix.zero)
        plain.values[0], plain.values[1] = plain.values.max(), plain.values.min()
        for most in (32639, 32639.25, 32639.5, 32640, 32767.5, 65535, 2.0**110, -(2.0**-79)):
            x = np.full((1, COLUMNS), most, np.float32)
            wanted = SEEN[16](x) @ plain.dequantise().astype(np.float64).T
            made = PackedMatrix(plain).multiply(torch.from_numpy(x), bits=16)
            assert np.allclose(made.numpy(), wanted, rtol=1e-6, atol=1e-6 * np.abs(wanted).max())
        tiny = np.full((1, COLUMNS), 2.0**-81, np.float32)
        assert not PackedMatrix(plain).multiply(torch.from_numpy(tiny), bits=16).any(), "taken as 0"


def test_what_is_no_number_stays_none():
    """A token with NaN or infinity among its activations, and no other token, has NaN or infinity as its result."""
    packed, x = PackedMatrix(matrices()[0]), torch.randn(4, COLUMNS)
    x[1, 5], x[2, 40] = float("nan"), float("inf")
    for bits in (8, 16):
        made = packed.multiply(x, bits=bits)
        assert made[[0, 3]].isfinite().all()
        assert not made[[1, 2]].isfinite().any()


def test_odd_widths_of_floats():
    weights = torch.randn(5, 50)
    x = torch.randn(3, 50)
    made = PackedMatrix(Floats(weights.numpy())).multiply(x)
    assert torch.allclose(made, x @ weights.T, atol=1e-5)


def test_quantise():
    weights = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    weights[1, :32] = 0
    for bits, most in ((8, 0.02), (4, 0.25)):
        made = quantise(weights, bits)
        assert np.abs(made.dequantise() - weights).max() < most
        assert np.array_equal(made.dequantise()[1, :32], weights[1, :32])


def test_quantise_by_all_threads():
    """The same bits as in numpy, for weights large and small, on a grid of halves, and all zero."""
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((300, 256)).astype(np.float32) * 10.0 ** rng.integers(-6, 4, (300, 1))
    weights[1, :32] = 0
    weights[2] = np.arange(256) % 16 + 0.5
    weights = weights.astype(np.float32)
    for bits in (4, 8):
        for given in (weights, weights[:, 32:224]):
            made, wanted = packed_quantise(given, bits), quantise(given, bits)
            assert made.values.dtype == wanted.values.dtype
            assert np.array_equal(made.values, wanted.values)
            assert np.array_equal(made.scales.view(np.uint16), wanted.scales.view(np.uint16))
            assert (made.minimums is None) == (wanted.minimums is None)
            if wanted.minimums is not None:
                assert np.array_equal(made.minimums.view(np.uint16), wanted.minimums.view(np.uint16))
