"""Gated products against their oracle: in Triton's interpreter on a CPU, for real on a GPU; there also the bits."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from redrafter.kernels.gated_product import naive
from redrafter.kernels.gated_product import triton as kernel
from redrafter.kernels.norm_gate import triton as norm_gate
from redrafter.kernels.product.triton import own_product
from tests.kernels.test_product import BIG, CLOSE, DEVICE, weights

SHAPES = [(200, 80), (144, 144)] + ([(22016, 4096), (27648, 5120), (3072, 576), (13824, 2304)] if BIG else [])  # 2·I, K


@pytest.mark.parametrize(("width", "size"), SHAPES)
@pytest.mark.parametrize("n", [1, 16, 33, 64, 130] if BIG else [1, 17])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_product(width, size, n, activation):
    dtype = torch.bfloat16 if BIG else torch.float16
    weight, bias = weights(width, size, dtype)
    x = torch.randn(n, size, device=DEVICE).to(dtype)
    for given in (None, bias):
        got = kernel.gated_product(x, weight, given, activation)
        torch.testing.assert_close(got, naive.gated_product(x, weight, given, activation), **CLOSE)
        apart = norm_gate.gate(own_product(x, weight, given), dtype, activation)
        assert torch.equal(got, apart), "the bits of two kernels one after the other"
    swapped = torch.cat([weight[width // 2 :], weight[: width // 2]])
    assert not torch.allclose(kernel.gated_product(x, swapped, bias, activation), got, **CLOSE), "twin: halves swapped"
    without = kernel.gated_product(x, weight, None, activation)
    assert not torch.allclose(without, got, **CLOSE), "twin: the bias forgotten"


def test_split_products_are_gated_by_their_own_kernel():
    weight, _ = weights(64, 256)
    x = torch.randn(3, 256, device=DEVICE).half()
    got, want = (m.gated_product(x, weight) for m in (kernel, naive))
    torch.testing.assert_close(got, want, **CLOSE)
