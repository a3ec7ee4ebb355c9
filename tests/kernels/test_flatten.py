"""The lines of trees against their oracle: in Triton's interpreter on a CPU, for real on a GPU."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from redrafter.core.tree import ancestors
from redrafter.kernels import flatten as operator
from redrafter.kernels.flatten import host, naive
from redrafter.kernels.flatten import triton as kernel
from redrafter.kernels.tree_attention.naive import INDEX, PLACE, SLOT, SLOTS, padding, visible

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = [  # rows, nodes with the root, lines before the first and behind the last
    (1, 1, 0, 0),
    (3, 1, 2, 5),
    (2, 7, 0, 0),
    (4, 9, 5, 40),
    (2, 65, 3, 1),
]
LARGE = [(256, 64, 7, 100), (32, 17, 0, 0), (1, 64, 0, 960)]


def random_trees(rows, n, seed=0):
    """Trees whose nodes may lie 15 deep; some nodes are dropped, with all below them. -> the first six arguments."""
    random = torch.Generator().manual_seed(seed)
    parents, depths = torch.zeros(2, rows, n, dtype=torch.long)
    real = torch.ones(rows, n, dtype=torch.bool)
    for row in range(rows):
        for i in range(1, n):
            choice = (depths[row, :i] < 15).nonzero()[:, 0][-4:]  # mostly deep
            parents[row, i] = parent = choice[torch.randint(len(choice), (), generator=random)]
            depths[row, i] = depths[row, parent] + 1
            real[row, i] = real[row, parent] & (torch.rand((), generator=random) > row / rows / 4)
    tokens = torch.randint(1000, (rows, n), generator=random)
    lengths = torch.randint(40, (rows,), generator=random)
    lengths[0] = 1 << 33
    places = torch.randperm(rows, generator=random) + 1
    return [x.to(DEVICE) for x in (tokens, depths, ancestors(parents, 15), real, lengths, places)]


def written(function, trees, begin, behind, longest=30):
    """The lines, the runs (in the middle of longer ones) and the nodes' lines."""
    rows, count = len(trees[0]), int(trees[3].sum())
    lines = torch.full_like(padding(begin + count + behind, DEVICE), 77)
    runs = torch.full((rows + 2, 2), 77, device=DEVICE)
    at = function(*trees, longest, lines, runs[1:-1], begin)
    return lines, runs, at


@pytest.mark.skipif(DEVICE == "cuda", reason="numpy writes to the memory of a CPU")
@pytest.mark.parametrize("case", [*CASES, *LARGE[1:]], ids=str)
def test_on_the_host(case):
    rows, n, begin, behind = case
    trees = random_trees(rows, n, seed=n)
    for want, got in zip(*(written(made, trees, begin, behind) for made in (naive.flatten, host.flatten)), strict=True):
        assert want.dtype == got.dtype
        assert torch.equal(want, got)


@pytest.mark.skipif(DEVICE == "cuda", reason="numpy writes to the memory of a CPU")
@pytest.mark.parametrize("depth", [16, 40])
def test_deeper_trees_have_longer_lines_on_the_host(depth):
    """Two chains below one root, node by node in turns."""
    parents = torch.tensor([[0, 0, 0, *range(1, 2 * depth - 1)]])
    depths = torch.tensor([[0, *(1 + i // 2 for i in range(2 * depth))]])
    mask = ancestors(parents, depth)
    given = (parents, depths, mask, torch.ones_like(parents, dtype=torch.bool), torch.tensor([5]), torch.tensor([0]))
    for newest in (depth, depth - 1):
        lines = padding(2 * depth + 1, newest=newest)
        host.flatten(*given, 1000, lines, torch.zeros(1, 2, dtype=torch.long), 0)
        index = lines[:, INDEX, None]
        assert torch.equal(index[:, 0], 5 + depths[0])
        older = torch.arange(5 + depth)  # a key that is not among the newest is in the slot of its index
        every = torch.cat([torch.where(older <= index - newest, older, -1), lines[:, SLOTS:]], 1)
        wrong = 0
        for line, slots in zip(lines, every, strict=True):
            path = mask[0, int(line[SLOT]) - 5].nonzero()[:, 0]
            wrong += sorted(set(slots.tolist()) - {-1}) != [*range(5), *(5 + path).tolist()]
        assert wrong == (newest < depth), "twin: the deepest node of the second chain lacks one"


@pytest.mark.parametrize("case", CASES + (LARGE if DEVICE == "cuda" else []), ids=str)
def test_kernel(case):
    rows, n, begin, behind = case
    trees = random_trees(rows, n, seed=n)
    want, got = (written(made.flatten, trees, begin, behind) for made in (naive, kernel))
    for name, a, b in zip(("lines", "runs", "at"), want, got, strict=True):
        assert a.dtype == b.dtype, name
        assert torch.equal(a, b), name
    assert got[0][:begin].eq(77).all(), "lines before the trees stay"
    assert torch.equal(got[0][len(got[0]) - behind :], padding(behind, DEVICE))


def test_a_node_sees_its_ancestors_and_the_text():
    """By the masks of the trees alone."""
    trees = random_trees(3, 20)
    _, _, mask, real, lengths, places = trees
    lengths[0] = 3
    lines, runs, at = written(kernel.flatten, trees, 1, 2)
    seen = visible(lines, 80)
    for row, (first, count) in enumerate(runs[1:-1].tolist()):
        length = int(lengths[row])
        assert count == int(real[row].sum())
        assert lines[first : first + count, PLACE].eq(places[row]).all()
        for node in range(20):
            line = int(at[row, node])
            assert line == first if not real[row, node] else lines[line, SLOT] == length + node
            if real[row, node]:
                assert seen[line, :length].all()
                assert torch.equal(seen[line, length : length + 20], mask[row, node])
    wrong = [*trees[:2], mask.roll(1, 0), *trees[3:]]
    assert not torch.equal(lines, written(kernel.flatten, wrong, 1, 2)[0]), "twin: ancestors of the neighbour's row"


def test_any_strides():
    trees = random_trees(4, 6)
    wide = [torch.stack([x, torch.zeros_like(x)], -1).transpose(0, 1)[..., 0].transpose(0, 1) for x in trees[:4]]
    wide += [torch.stack([x, x], 1)[:, 0] for x in trees[4:]]
    assert not any(x.is_contiguous() for x in wide)
    for a, b in zip(written(kernel.flatten, trees, 2, 3), written(kernel.flatten, wide, 2, 3), strict=True):
        assert torch.equal(a, b)


def test_nodes_without_room_are_not_written():
    trees = random_trees(2, 7)
    whole = torch.full_like(padding(30, DEVICE), 77)
    kernel.flatten(*trees, 30, whole[:9], torch.zeros(2, 2, dtype=torch.long, device=DEVICE), 0)
    assert whole[9:].eq(77).all()


def test_shapes_that_a_compiler_sees():
    trees = random_trees(2, 3)
    runs = torch.zeros(2, 2, dtype=torch.long, device=DEVICE)
    given = (*trees, 30, padding(9, DEVICE), runs, 1)
    torch.library.opcheck(operator._flatten, given, test_utils=("test_schema", "test_faketensor"))
