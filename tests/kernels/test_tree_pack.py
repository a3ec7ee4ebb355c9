"""The packing kernel against its oracle: in Triton's interpreter on a CPU, for real on a GPU."""

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

pytest.importorskip("triton", reason="triton is not installed")

from redrafter import kernels  # noqa: E402
from redrafter.kernels import tree_pack  # noqa: E402
from redrafter.kernels.tree_pack import naive  # noqa: E402
from redrafter.kernels.tree_pack import triton as kernel  # noqa: E402

NAMES = ("tokens", "parents", "depths", "valid", "mask", "place", "scores")
CASES = [(1, 1, 1, 1), (3, 4, 3, 5), (2, 3, 5, 15), (2, 16, 5, 63), (1, 2, 12, 4), (1, 64, 5, 63)]
"""Rows, nodes of each depth, depths, budget."""


def random_nodes(rows, width, length, seed=0):
    """Scores have ties, empty nodes, and children above their parents."""
    random = torch.Generator().manual_seed(seed)

    def below(most, *shape):
        return torch.randint(most, shape, generator=random)

    depths = torch.arange(1, length + 1).repeat_interleave(width)
    parents = torch.where(depths == 1, 0, 1 + (depths - 2) * width + below(width, rows, width * length))
    scores = -(depths + below(3, rows, width * length)).float()
    scores[below(5, *scores.shape) == 0] = -torch.inf
    nodes = (below(99, *parents.shape), parents, depths.expand(rows, -1), scores, below(99, rows))
    return [x.to(DEVICE) for x in nodes]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel(case):
    rows, width, length, budget = case
    for seed in range(3):
        nodes = random_nodes(rows, width, length, seed)
        want, got = (made.pack(*nodes, budget, length) for made in (naive, kernel))
        for name, a, b in zip(NAMES, want, got, strict=True):
            assert a.dtype == b.dtype, name
            assert torch.equal(a, b), name


def test_any_strides():
    tokens, parents, depths, scores, last = random_nodes(3, 4, 3)
    turned = [x.t().contiguous().t() for x in (tokens, parents, scores)]
    want = kernel.pack(tokens, parents, depths, scores, last, 7, 3)
    wide = torch.stack([last, last], 1)[:, 1]
    for a, b in zip(want, kernel.pack(turned[0], turned[1], depths, turned[2], wide, 7, 3), strict=True):
        assert torch.equal(a, b)


def test_scores_that_are_not_numbers_keep_as_many_nodes():
    tokens, parents, depths, scores, last = random_nodes(2, 4, 3)
    scores[0, ::2] = torch.nan
    scores[1] = torch.nan
    valid, _, place, _ = kernel.pack(tokens, parents, depths, scores, last, 6, 3)[3:]
    assert [sorted(row) for row in place.tolist()] == [[0] * 7 + list(range(1, 7))] * 2
    assert valid[1].tolist() == [True] + [False] * 6


def test_many_nodes_are_left_to_the_oracle():
    nodes = random_nodes(1, tree_pack.MOST + 1, 1)
    with kernels.force("triton"):
        found = tree_pack.pack(*nodes, 5, 1)
    assert torch.equal(found[0], naive.pack(*nodes, 5, 1)[0])


def test_shapes_that_a_compiler_sees():
    nodes = random_nodes(2, 3, 2)
    torch.library.opcheck(tree_pack._pack, (*nodes, 4, 2), test_utils=("test_schema", "test_faketensor"))
