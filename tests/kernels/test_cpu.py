"""The CPU's compiled functions against torch's: the same numbers, and the same bits alone and among others.

For every set of instructions that this CPU has.
"""

import pytest
import torch

from redrafter.core.noise import gumbel, uniform
from redrafter.kernels import force
from redrafter.kernels.cpu import naive, ops

pytestmark = [
    pytest.mark.skipif(not ops.available(), reason="no C++ compiler here"),
    pytest.mark.usefixtures("lib"),
]


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def gap(one, other):
    return float((one - other).abs().max() / other.abs().max())


SIZES = [(576, 192), (1, 1), (7, 5), (16, 4), (33, 50), (64, 3), (129, 70)]


@pytest.mark.parametrize(("size", "out"), SIZES)
@pytest.mark.parametrize("threads", [1, 2])
def test_products(size, out, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        weight, bias = torch.randn(out, size), torch.randn(out)
        for n in range(1, ops.MOST + 1):
            x = torch.randn(n, size)
            assert gap(ops.linear(x, weight), naive.linear(x, weight)) < 2e-6
            assert gap(ops.linear(x, weight, bias), naive.linear(x, weight, bias)) < 2e-6
    finally:
        torch.set_num_threads(before)


def tokens_alone(product, x):
    return torch.cat([product(row[None].contiguous()) for row in x])


@pytest.mark.parametrize(("size", "out"), SIZES)
def test_a_token_alone_and_among_others_is_the_same_bit_for_bit(size, out):
    weight, bias = torch.randn(out, size), torch.randn(out)
    gate, up, down = torch.randn(out, size), torch.randn(out, size), torch.randn(size, out)
    for n in range(2, ops.MOST + 1):
        x = torch.randn(n, size)
        for product in (
            lambda x: ops.linear(x, weight, bias),
            lambda x: ops.gated(x, gate, up, down),
            lambda x: ops.rms_norm(x, torch.ones(size), 0.0, 1e-5),
        ):
            assert torch.equal(product(x), tokens_alone(product, x))


def test_twin_a_sum_whose_order_depends_on_n_is_seen():
    """The same test on a product that sums in as many parts as there are tokens must fail."""
    weight = torch.randn(64, 575)

    def product(x):
        parts = zip(x.chunk(len(x), 1), weight.chunk(len(x), 1), strict=True)
        return torch.stack([ops.linear(a.contiguous(), b.contiguous()) for a, b in parts]).sum(0)

    x = torch.randn(5, 575)
    assert gap(product(x), naive.linear(x, weight)) < 2e-6
    assert not torch.equal(product(x), tokens_alone(product, x))


@pytest.mark.parametrize(("size", "middle"), [(576, 1536), (33, 50), (5, 7)])
def test_what_stands_between(size, middle):
    gate, up, down = torch.randn(middle, size), torch.randn(middle, size), torch.randn(size, middle)
    weight = torch.randn(size)
    each = [(torch.randn(o, size), b) for o, b in ((middle, torch.randn(middle)), (5, None), (18, torch.randn(18)))]
    for n in (1, 2, 6, 7, 16):
        x = torch.randn(1, n, size)
        assert gap(ops.gated(x, gate, up, down), naive.gated(x, gate, up, down)) < 5e-6
        assert gap(ops.rms_norm(x, weight, 1.0, 1e-5), naive.rms_norm(x, weight, 1.0, 1e-5)) < 2e-6
        for one, other in zip(ops.linear3(x, each), naive.linear3(x, each), strict=True):
            assert gap(one, other) < 2e-6


def test_extreme_gates_neither_overflow_nor_vanish():
    x = torch.tensor([[-1e4, -90.0, -88.0, 0.0, 88.0, 1e4]]).T.contiguous()
    one = torch.ones(1, 1)
    assert torch.allclose(ops.gated(x, one, one, one), naive.gated(x, one, one, one), rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("size", [64, 16, 48, 128])
@pytest.mark.parametrize(("batch", "n"), [(1, 1), (1, 6), (2, 5), (3, 5), (1, 16)])
def test_attention(size, batch, n):
    heads, kv_heads, slots, extent = 6, 2, 75, 60
    q, cos, sin = torch.randn(batch, n, heads * size), torch.randn(batch, n, size), torch.randn(batch, n, size)
    k, v = torch.randn(batch, n, kv_heads * size), torch.randn(batch, n, kv_heads * size)
    keys, values = torch.randn(batch, kv_heads, slots, size), torch.randn(batch, kv_heads, slots, size)
    at = torch.randint(20, 44, (batch, 1)) + torch.arange(n)
    other_q, other_keys, other_values = q.clone(), keys.clone(), values.clone()
    ops.rotate_and_store(q, k, v, cos, sin, at, keys, values)
    naive.rotate_and_store(other_q, k, v, cos, sin, at, other_keys, other_values)
    assert gap(q, other_q) < 1e-6
    assert gap(keys, other_keys) < 1e-6
    assert torch.equal(values, other_values)
    hidden = torch.rand(batch, 1, n, extent) < 0.4
    hidden[..., 0] = False
    mask = torch.zeros(batch, 1, n, extent).masked_fill(hidden, torch.finfo(torch.float32).min)
    queries = q.view(batch, n, heads, size)
    given = (queries, keys[:, :, :extent], values[:, :, :extent], mask)
    assert ops.attendable(*given)
    assert gap(ops.attend(*given, size**-0.5), naive.attend(*given, size**-0.5)) < 5e-6


def test_attention_of_a_token_does_not_depend_on_its_company_nor_on_slots():
    """A node beside others, whose ancestors lie apart, against the same node in plain decoding."""
    q, keys, values = torch.randn(1, 3, 6, 64), torch.randn(1, 2, 40, 64), torch.randn(1, 2, 40, 64)
    visible = torch.arange(40) < torch.tensor([[20], [5], [20]])
    visible[0, [23, 31]] = visible[2, [31, 33, 34]] = True
    mask = torch.zeros(1, 1, 3, 40).masked_fill(~visible, torch.finfo(torch.float32).min)
    together = ops.attend(q, keys, values, mask, 0.125)
    for node in range(3):
        plain = [x[:, :, visible[node]].contiguous() for x in (keys, values)]
        nothing_hidden = torch.zeros(1, 1, 1, plain[0].shape[2])
        alone = ops.attend(q[:, node : node + 1].contiguous(), *plain, nothing_hidden, 0.125)
        assert torch.equal(together[:, node], alone[:, 0])
    turned = [x.flip(2).contiguous() for x in (keys, values)]
    other_order = ops.attend(q, *turned, mask.flip(3), 0.125)
    assert gap(other_order, together) < 1e-5
    assert not torch.equal(other_order, together), "twin: another order of the same sum"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_paths_move_as_gathered_and_scattered(dtype):
    cache = torch.randn(3, 2, 20, 8).to(dtype)
    lengths, path = torch.tensor([4, 9, 0]), torch.tensor([[0, 2, 5], [0, 1, 3], [0, 3, 0]])
    other = cache.clone()
    ops.move_path(cache, lengths, path)
    naive.move_path(other, lengths, path)
    assert torch.equal(cache, other)


def test_random_numbers_have_the_same_bits():
    seeds, positions = torch.tensor([3, -7, 2**62]), torch.tensor([[0, 1], [5, 900], [77, 8191]])
    found = []
    for way in ("cpp", "naive"):
        with force(way):
            found.append([make(seeds, positions, 5003, stream=1, dtype=torch.float32) for make in (uniform, gumbel)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert 0.49 < float(found[0][0].mean()) < 0.51
    assert 0 < float(found[0][0].min()) < float(found[0][0].max()) < 1


def test_what_the_compiled_functions_are_not_made_for():
    x = torch.randn(4, 32)
    assert ops.usable(x)
    assert not ops.usable(x.T)
    assert not ops.usable(x[:, ::2])
    assert not ops.usable(x.double())
    assert not ops.usable(torch.randn(17, 32))
    assert not ops.usable(torch.randn(0, 32))
    with torch.enable_grad():
        assert not ops.usable(x)
    assert not ops.readable(torch.randn(8, 4).T)
    assert not ops.readable(torch.randn(8, 4).bfloat16())
    q, keys = torch.randn(1, 2, 4, 16), torch.randn(1, 2, 9, 16)
    mask = torch.zeros(1, 1, 2, 9)
    assert ops.attendable(q, keys, keys, mask)
    assert not ops.attendable(q, keys, keys, None)
    assert not ops.attendable(q, keys, keys, mask.expand(1, 4, 2, 9))
    assert not ops.attendable(q[..., :8].contiguous(), keys[..., :8].contiguous(), keys[..., :8].contiguous(), mask)
    assert not ops.attendable(q, keys.transpose(2, 3).contiguous().transpose(2, 3), keys, mask)
