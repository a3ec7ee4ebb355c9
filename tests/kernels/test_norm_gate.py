"""Residual sums, norms and gates against their oracle: in Triton's interpreter on a CPU, for real on a GPU."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from redrafter.kernels.norm_gate import naive
from redrafter.kernels.norm_gate import triton as kernel

BIG = torch.cuda.is_available()
DEVICE = "cuda" if BIG else "cpu"
DTYPES = [torch.float32, torch.bfloat16] if BIG else [torch.float32]
SIZES = [16, 100, 4096] if BIG else [16, 100]
BOTH = kernel, naive
pytestmark = pytest.mark.filterwarnings("ignore:overflow")  # numpy, in the interpreter: exp(large) is inf, as on a GPU


def close(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(*shape, device=DEVICE) * 3).to(dtype)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norms", ["before", "after", "both", "none"])
def test_add_norm(rows, size, dtype, norms):
    torch.manual_seed(size)
    x = random(rows, 2 * size, dtype=dtype)[:, :size]  # rows that do not touch
    after = naive.Norm(random(size, dtype=dtype), 1.0, 1e-6) if norms in ("after", "both") else None
    before = naive.Norm(random(size, dtype=dtype), 0.0, 1e-5) if norms in ("before", "both") else None
    tight, parts = close(dtype), random(3, rows, size)
    for given in (parts, parts[:1].to(dtype)):
        sums = torch.empty(2, rows, 3, size, dtype=dtype, device=DEVICE)[:, :, 1]
        got, want = (m.add_norm(x, given, after, before, s) for m, s in zip(BOTH, sums, strict=True))
        torch.testing.assert_close(got, want, **tight)
        torch.testing.assert_close(*sums, **tight)
        assert (got.data_ptr() == sums[0].data_ptr()) == (before is None)
        onto = x.clone()
        assert torch.equal(kernel.add_norm(onto, given, after, before, onto), got), "the sum may replace x"
        assert torch.equal(onto, sums[0])
        less = naive.add_norm(x, given[1:] if len(given) > 1 else given * 0, after, before, torch.empty_like(x))
        assert not torch.allclose(got, less, **tight), "twin: a part left out"
        for name, norm in (("after", after), ("before", before)):
            changed = {"after": after, "before": before, name: norm and norm._replace(offset=0.5)}
            other = naive.add_norm(x, given, into=torch.empty_like(x), **changed)
            assert torch.allclose(got, other, **tight) == (norm is None), "twin: a norm with another offset"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_norm_without_parts_leaves_its_input(size, dtype, offset):
    torch.manual_seed(size)
    x = random(5, 2 * size, dtype=dtype)[:, :size]
    before, norm = x.clone(), naive.Norm(random(size, dtype=dtype), offset, 1e-5)
    got, want = (m.add_norm(x, None, None, norm) for m in BOTH)
    torch.testing.assert_close(got, want, **close(dtype))
    assert torch.equal(x, before)
    other = naive.add_norm(x, None, None, norm._replace(offset=1 - offset))
    assert not torch.allclose(got, other, **close(dtype)), "twin: another offset"


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gate(count, size, dtype, activation, monkeypatch):
    if not BIG:
        monkeypatch.setattr(kernel, "TILE", 64)  # several tiles, the last one not full
    torch.manual_seed(size)
    parts = random(count, 5, 2 * size, dtype=dtype if count == 1 else torch.float32)
    got, want = (m.gate(parts, dtype, activation) for m in BOTH)
    assert got.dtype == dtype
    torch.testing.assert_close(got, want, **close(dtype))
    swapped = torch.cat(parts.chunk(2, -1)[::-1], -1)
    assert not torch.allclose(got, naive.gate(swapped, dtype, activation), **close(dtype)), "twin: halves swapped"
    other = "silu" if activation == "gelu_tanh" else "gelu_tanh"
    assert not torch.allclose(got, naive.gate(parts, dtype, other), **close(dtype)), "twin: another activation"


@pytest.mark.skipif(not BIG, reason="needs a GPU")
def test_three_parts_added_the_other_way_round_have_other_bits():
    """So the order of the parts is part of what the kernels promise."""
    x, parts = random(64, 4096), random(3, 64, 4096)
    norm = naive.Norm(random(4096), 0.0, 1e-5)
    one, same, other = (
        kernel.add_norm(x, p, None, norm, torch.empty_like(x)) for p in (parts, parts.clone(), parts.flip(0))
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
