"""Products against their oracle: in Triton's interpreter on a CPU, for real on a GPU; there also the bits."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from redrafter.kernels import product as operator
from redrafter.kernels.product import naive, parts_of
from redrafter.kernels.product import triton as kernel

BIG = torch.cuda.is_available()
DEVICE = "cuda" if BIG else "cpu"
CLOSE = {"rtol": 1e-2, "atol": 1e-2}
SHAPES = [(40, 80, 1), (72, 144, 1), (64, 256, 2), (130, 512, 4)]  # O, K, parts
LARGE = [(4096, 4096, 2), (576, 1536, 4), (49152, 576, 1), (2560, 6912, 2)]


def weights(width: int, size: int, dtype: torch.dtype = torch.float16) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight of which every row stands apart from the next, and a bias."""
    torch.manual_seed(size)
    weight = (torch.randn(width, size + 16, device=DEVICE) / size**0.5).to(dtype)[:, :size]
    return weight, torch.randn(width, device=DEVICE).to(dtype)


@pytest.mark.parametrize(("width", "size", "parts"), SHAPES + (LARGE if BIG else []))
@pytest.mark.parametrize("n", [1, 5, 17, 64, 130, 300] if BIG else [1, 5, 17])
def test_product(width, size, parts, n):
    weight, bias = weights(width, size)
    x = torch.randn(n, size, device=DEVICE).half()
    for given in (None, bias):
        got, want = kernel.own_product(x, weight, given), naive.product(x, weight, given)
        assert got.shape == (parts, n, width)
        assert got.dtype == (torch.half if parts == 1 else torch.float32) == want.dtype
        torch.testing.assert_close(got, want, **CLOSE)
        exact = x.float() @ weight.float().T + (0 if given is None else bias.float())
        torch.testing.assert_close(got.float().sum(0), exact, **CLOSE)
    without = kernel.own_product(x, weight)
    assert not torch.allclose(without, got, **CLOSE), "twin: the bias forgotten"
    assert torch.equal(without[1:], got[1:]), "the bias is in the first part"
    assert parts == 1 or not torch.allclose(got.flip(0), want, **CLOSE), "twin: parts in another order"
    x[:, -1] += 2
    assert not torch.allclose(kernel.own_product(x, weight, bias), want, **CLOSE), "twin: the last column is read"


@pytest.mark.parametrize(("width", "size", "parts"), [*SHAPES, *LARGE, (64 * 33, 512, 4), (64 * 34, 512, 2)])
def test_the_number_of_parts_depends_on_the_weights_shape_alone(width, size, parts):
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        weight = torch.empty(width, size, dtype=dtype, device="meta")
        assert parts_of(weight) == parts
        assert parts_of(torch.empty(width, 2 * size, dtype=dtype, device="meta")[:, :size]) == parts
    assert size % parts == 0


def test_what_the_kernel_cannot_do_goes_to_the_oracle(monkeypatch):
    monkeypatch.setattr(operator, "runs_triton", lambda device: True)
    used = []
    monkeypatch.setattr(kernel, "product", lambda x, w, b: used.append(w.shape))
    monkeypatch.setattr(naive, "product", lambda x, w, b: used.append("naive"))
    x = torch.ones(1, 24, device=DEVICE).half()
    operator.product(x[:, :16], torch.ones(8, 16, device=DEVICE).half())
    assert used.pop() == (8, 16)
    for weight in (torch.ones(8, 16), torch.ones(8, 24).half(), torch.ones(16, 8).half().T):
        operator.product(x[:, : weight.shape[1]], weight.to(DEVICE))
        assert used.pop() == "naive"


@pytest.mark.skipif(not BIG, reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("width", "size", "parts"), SHAPES + LARGE)
def test_a_row_has_the_same_bits_in_every_pass(width, size, parts, dtype, monkeypatch):
    """256 tokens and more may be the library's product, where the library agrees."""
    weight, bias = weights(width, size, dtype)
    x = torch.randn(2048, size, device=DEVICE).to(dtype)
    alone = torch.cat([kernel.product(row[None], weight, bias) for row in x[:300]], dim=1)
    for n in (2, 16, 17, 63, 64, 130, 256, 300, 512, 2048):
        rows = min(n, 300)
        assert torch.equal(kernel.product(x[:n], weight, bias)[:, :rows], alone[:, :rows])
        assert torch.equal(kernel.product(x[:n].flip(0), weight, bias).flip(1)[:, :rows], alone[:, :rows])
    if parts > 1:  # twin: another number of parts for many tokens
        monkeypatch.setattr(kernel, "parts_of", lambda weight: 1)
        whole = kernel.own_product(x[:300], weight, bias)[0]
        assert not torch.equal(whole, alone.sum(0).to(dtype))
