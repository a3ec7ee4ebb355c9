"""Attention of a row's tokens together: the bits of each token alone, whatever its company and wherever its keys lie.

For every set of instructions that this CPU has.
"""

import numpy as np
import pytest
import torch

from redrafter.kernels.cpu import library
from redrafter.kernels.cpu.matrices import Floats
from redrafter.kernels.cpu.model import SCALE_BYTES, SILU, LayerWeights, PassModel, Sizes, shapes_of
from tests.helpers import cpu_results

pytestmark = [
    pytest.mark.skipif(library.library() is None, reason="no C++ compiler here"),
    pytest.mark.usefixtures("lib"),
]
SLOTS, VOCAB, ROWS = 140, 200, 3
HEADS = ((16, 6, 2), (48, 4, 4), (64, 9, 3), (128, 18, 1))
"""Sizes of heads, heads, key heads: 16 pairs end within a token of 3 heads, or are of 16 tokens, or of one in part."""
DTYPES = (torch.float32, torch.float16, torch.int8)


def model(size, heads, kv_heads, spoilt=()):
    """Three layers; windows of the second and third limit all tokens, the last one to less than a tree's depth.

    The embeddings of `spoilt` tokens are no numbers.
    """
    rng = np.random.default_rng(0)
    sizes = Sizes(
        hidden=32, heads=heads, kv_heads=kv_heads, size=size, middle=32, gate=SILU, eps=1e-5, scale=size**-0.5
    )
    made = []
    for window in (0, 21, 5):
        given = {name: cpu_results.floats(*shape, rng=rng) / 4 for name, shape in shapes_of(sizes).items()}
        matrices = {name: Floats(values) for name, values in given.items() if values.ndim == 2}
        vectors = {name: values for name, values in given.items() if values.ndim == 1}
        made.append(LayerWeights(matrices, vectors, 0, window))
    head = cpu_results.floats(VOCAB, 32, rng=rng)
    embedding = head.copy()
    embedding[list(spoilt)] = np.nan
    return PassModel(sizes, made, Floats(embedding), Floats(head), cpu_results.floats(32, rng=rng))


def filled(packed, dtype):
    """Keys and values of tokens before, at all slots."""
    shape, cache = (ROWS, packed.sizes.kv_heads, SLOTS, packed.sizes.size), []
    for _ in range(2 * packed.layer_count):
        numbers = torch.from_numpy(cpu_results.floats(*shape, rng=np.random.default_rng(len(cache))))
        if dtype is torch.int8:
            scales = torch.full((*shape[:3], 1), 0.01).view(torch.int8).expand(*shape[:3], SCALE_BYTES)
            numbers = torch.cat([(127 * numbers).to(torch.int8), scales], 3)
        cache.append(numbers.to(dtype).contiguous())
    return list(zip(cache[::2], cache[1::2], strict=True))


def run(packed, cache, lines):
    angles = torch.arange(SLOTS)[:, None] * 0.9 ** torch.arange(packed.sizes.size // 2)
    return packed.run(lines, cache, [(angles.cos(), angles.sin())], wanted=(1, 2, 3))


def together(packed, dtype, lines):
    return run(packed, filled(packed, dtype), lines)


def alone(packed, dtype, lines):
    """The same tokens, one in each pass."""
    cache = filled(packed, dtype)
    return [torch.cat(parts) for parts in zip(*(run(packed, cache, line[None]) for line in lines), strict=True)]


def same(one, other):
    return all(a.numpy().tobytes() == b.numpy().tobytes() for a, b in zip(one, other, strict=True))


def branching(rng, count):
    return [-1, *(int(rng.integers(max(0, node - 3), node)) for node in range(1, count))]


def trees(rng, counts, place_nodes=lambda first, count: range(first, first + count)):
    """Trees of so many nodes in neighbouring rows, behind texts of different lengths."""
    lengths = rng.integers(0, 90, len(counts))
    return torch.cat([
        cpu_results.tree(row, int(length), branching(rng, count), place_nodes(int(length), count))
        for row, (length, count) in enumerate(zip(lengths, counts, strict=True))
        if count
    ])  # fmt: skip


@pytest.mark.parametrize(("size", "heads", "kv_heads"), HEADS)
def test_a_node_has_the_bits_of_plain_decoding(size, heads, kv_heads):
    rng, packed = np.random.default_rng(size), model(size, heads, kv_heads)
    for dtype in DTYPES:
        for counts in ((1, 9, 2), (17, 0, 3)):
            lines = trees(rng, counts)
            found = together(packed, dtype, lines)
            assert found[0].isfinite().all()
            assert same(found, alone(packed, dtype, lines))


def test_every_number_of_nodes():
    rng, packed = np.random.default_rng(0), model(16, 6, 2)
    for count in range(1, 18):
        lines = trees(rng, (count, 18 - count))
        assert same(together(packed, torch.float32, lines), alone(packed, torch.float32, lines))


def test_nodes_in_any_slots():
    """In another order than their depths, behind free slots, and so far behind that each is attended to alone."""
    rng, packed = np.random.default_rng(0), model(16, 6, 2)
    for place_nodes in (
        lambda first, count: [first + int(i) for i in rng.permutation(count)],
        lambda first, count: [first + 2 * i + 7 for i in range(count)],
        lambda first, count: range(SLOTS - count, SLOTS),
    ):
        for _ in range(3):
            lines = trees(rng, (9, 4, 1), place_nodes)
            assert same(together(packed, torch.float32, lines), alone(packed, torch.float32, lines))


def test_what_is_no_number_stays_in_its_branch():
    """No token sees keys or values of another branch, or of free slots: times a weight of 0 they would be NaN."""
    lines = cpu_results.tree(0, 40, (-1, 0, 0, 1, 1), range(40, 45))
    packed = model(16, 6, 2)
    wanted, cache = together(packed, torch.float32, lines), filled(packed, torch.float32)
    for part in (part for pair in cache for part in pair):
        part[:, :, 45:] = torch.nan
    found = run(model(16, 6, 2, spoilt=[int(lines[2, 0])]), cache, lines)
    others = [0, 1, 3, 4]
    assert same([made[others] for made in found], [made[others] for made in wanted])
    assert not any(made[2].isfinite().any() for made in found)


def test_twin_another_order_of_sums():
    """A token that sees the same keys with two of them in turned order: the same numbers but for the last bits."""
    packed = model(16, 6, 2)
    lines = cpu_results.tree(0, 12, branching(np.random.default_rng(0), 9), range(12, 21))
    wanted = together(packed, torch.float32, lines)
    assert same(wanted, alone(packed, torch.float32, lines))
    turned = lines.clone()
    turned[-1, [-8, -9]] = lines[-1, [-9, -8]]
    first, other = wanted[1][:, :32], together(packed, torch.float32, turned)[1][:, :32]
    assert same([first[:-1]], [other[:-1]])
    assert torch.allclose(first[-1], other[-1], atol=1e-5)
    assert not torch.equal(first[-1], other[-1])
