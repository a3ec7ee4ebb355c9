"""Which nodes a plan takes: those that pay, always a tree, and packed as the tensors' own packing packs them."""

import itertools
import random

import pytest
import torch

from redrafter.core.beam import Beam, visited_nodes
from redrafter.core.chain import Chain
from redrafter.core.tree import Nodes, pack
from redrafter.planning.calibration import MOST, calibrated
from redrafter.planning.plan import Drafted, Plan, worth
from redrafter.runtime.host_tree import HostNodes, host_tree
from tests.helpers.planning import make_row


def random_nodes(draw: random.Random, rows: int, width: int, length: int) -> Nodes:
    """Trees as a beam search leaves them; some nodes are empty, some scores are rounded above their parents'."""
    total = width * length
    places = [(depth - 1) * width for depth in range(length) for _ in range(width)]
    parents = [[0 if place < 0 else 1 + place + draw.randrange(width) for place in places] for _ in range(rows)]
    scores = [[0.0] * total for _ in range(rows)]
    for row in range(rows):
        for node in range(total):
            above = scores[row][parents[row][node] - 1] if parents[row][node] else 0.0
            step = draw.choice([draw.uniform(-2, -0.01), draw.uniform(-2, -0.01), 1e-7, -float("inf")])
            scores[row][node] = above + step
    depths = torch.arange(total)[None] // width + 1
    tokens = torch.tensor([[draw.randrange(50) for _ in range(total)] for _ in range(rows)])
    return Nodes(tokens, torch.tensor(parents), depths.expand(rows, -1), torch.tensor(scores), length)


def random_beam(draw: random.Random, rows: int, width: int, length: int) -> Beam:
    tokens = torch.tensor([[[draw.randrange(50) for _ in range(width)] for _ in range(length)] for _ in range(rows)])
    parents = torch.tensor(
        [[[draw.randrange(width) for _ in range(width)] for _ in range(length)] for _ in range(rows)]
    )
    scores = -torch.arange(1.0, length + 1)[None, :, None] - torch.rand(rows, length, width)
    follows = torch.tensor([[True] + [False] * (width - 1), [False] * width, [False] * (width - 1) + [True]])[:rows]
    return Beam(tokens, parents, scores, follows)


@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("width", [1, 3])
def test_nodes_of_a_beam_are_those_that_tensors_give(chained, width):
    beam = random_beam(random.Random(width), 3, width, 3)
    chain = Chain(torch.arange(15).view(3, 5), torch.rand(3, 5) * 0.9 + 0.05) if chained else None
    mine, theirs = HostNodes.of(beam, chain), visited_nodes(beam, chain)
    for row in range(3):
        real = [i for i, score in enumerate(theirs.scores[row].tolist()) if score > -float("inf")]
        assert mine.tokens[row] == theirs.tokens[row, real].tolist()
        assert mine.parents[row] == theirs.parents[row, real].tolist()
        assert mine.depths[row] == theirs.depths[row, real].tolist()
        assert mine.scores[row] == pytest.approx(theirs.scores[row, real].tolist())
    assert mine.levels == 3
    assert max(map(max, mine.depths)) == (5 if chained else 3)


@pytest.mark.parametrize("seed", [0, 1, 2, 4, 5])
def test_a_tree_of_all_nodes_is_the_one_that_tensors_pack(seed):
    """Twin: with another parent it is not."""
    draw = random.Random(seed)
    nodes = random_nodes(draw, 3, 3, 3)
    last = torch.tensor([51, 52, 53])
    want, _ = pack(nodes, last, 9)
    real = [[i + 1 for i, score in enumerate(row) if score > -float("inf")] for row in nodes.scores.tolist()]
    tree = host_tree(HostNodes.of(nodes), real, last)
    for row, ids in enumerate(real):
        n = len(ids) + 1
        for mine, theirs in ((tree.tokens, want.tokens), (tree.parents, want.parents), (tree.depths, want.depths)):
            assert mine[row, :n].tolist() == theirs[row, :n].tolist()
        assert torch.equal(tree.mask[row, :n, :n], want.mask[row, :n, :n])
        assert tree.valid[row].tolist() == [True] * n + [False] * (tree.nodes + 1 - n)
    deep, last_id = next((row, ids[-1]) for row, ids in enumerate(real) if ids and nodes.depths[row, ids[-1] - 1] > 1)
    nodes.parents[deep, last_id - 1] = 0
    assert not torch.equal(host_tree(HostNodes.of(nodes), real, last).mask, tree.mask)


@pytest.mark.parametrize("seed", range(20))
def test_what_pays_is_the_best_of_all_choices(seed):
    draw = random.Random(seed)
    nodes = [(-draw.random(), draw.randrange(2), i + 1) for i in range(8)]
    slope = draw.uniform(0.1, 0.6)

    def gain(chosen):
        return -sum(p for p, _, _ in chosen) - slope * len(chosen)

    best = max((c for n in range(9) for c in itertools.combinations(nodes, n)), key=gain)
    assert gain(worth(nodes, lambda n: slope * n, 9)) == pytest.approx(gain(best))
    few = worth(nodes, lambda n: 0.0, 2)
    assert [sum(place == i for _, place, _ in few) for i in (0, 1)] == [
        min(2, sum(place == i for _, place, _ in nodes)) for i in (0, 1)
    ]


def test_a_price_that_falls_later_is_seen():
    """A pass may compute tokens in groups, where the next one costs nothing."""
    prices = [0.0, 0.6, 0.6, 0.6]
    assert len(worth([(-0.5, 0, 1), (-0.4, 0, 2), (-0.3, 0, 3)], lambda n: prices[n], 9)) == 3
    assert worth([(-0.5, 0, 1)], lambda n: prices[n], 9) == []


@pytest.mark.parametrize("seed", range(10))
def test_chosen_nodes_are_trees_within_their_limits(seed):
    draw = random.Random(seed)
    nodes, rows = random_nodes(draw, 3, 3, 4), [make_row([i]) for i in range(2)]
    plan = Plan(
        price=lambda n: 0.05 * n,
        trust={row: draw.uniform(0.3, 2) for row in rows},
        room={rows[0]: 2, rows[1]: 9},
        most=5,
    )
    tree = plan.pack([rows[0], None, rows[1]], HostNodes.of(nodes), torch.tensor([7, 8, 9]))
    assert tree.valid[1].tolist() == [True] + [False] * tree.nodes, "this row guesses nothing"
    assert int(tree.depths[0].max()) <= 2
    assert plan.nodes == int(tree.valid[:, 1:].sum())
    assert plan.levels == 4
    for place, row in ((0, rows[0]), (2, rows[1])):
        drafted = plan.drafted[row].nodes
        assert len(drafted) <= 5
        assert all(parent == 0 or parent in drafted for parent, _ in drafted.values())
        assert [token for _, token in drafted.values()] == tree.tokens[place, 1 : len(drafted) + 1].tolist()
        assert 0 <= plan.expected[row] <= sum(plan.reached[row])


def test_trust_decides_how_likely_a_node_is():
    row, nodes = make_row([1]), HostNodes([[5]], [[0]], [[1]], [[-0.5]], levels=1)
    for trust in (0.1, 1.0, 50.0):
        plan = Plan(trust={row: trust}, room={row: 9}, most=5)
        plan.pack([row], nodes, torch.tensor([4]))
        assert plan.expected[row] == pytest.approx(min(MOST, trust * calibrated(0.60653)), rel=1e-4)


def test_guesses_that_no_token_reached_are_not_decided():
    drafted = Drafted({1: (0, 5), 2: (1, 6), 3: (2, 7)}, [1, 0.5, 0.5, 0.5])
    assert drafted.decided([5]) == (0.5, 1)
    assert drafted.decided([9, 6]) == (0.5, 0)
    assert drafted.decided([5, 6, 8]) == (1.5, 2)
    assert drafted.decided([]) == (0.0, 0)
