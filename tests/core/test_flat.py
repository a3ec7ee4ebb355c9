"""The lines of a flat pass: what each token sees, wherever it stands, and the budget of all rows."""

import random
from dataclasses import replace

import pytest
import torch

from redrafter.core.cache import tree_visibility
from redrafter.core.flat import Flat, Piece, budgeted, of_pieces, of_trees, promised, put_trees, ranks
from redrafter.core.tree import Tree, candidate_nodes, pack
from redrafter.kernels.tree_attention import naive
from redrafter.kernels.tree_attention.naive import INDEX, PLACE, SLOT, TOKEN, visible

SLOTS = 90


def random_trees(rows: int, width: int = 4, length: int = 5, budget: int = 12, seed: int = 0) -> Tree:
    chance = torch.Generator().manual_seed(seed)
    beam = torch.randint(3, (rows, width, length), generator=chance)
    scores = torch.rand(beam.shape, generator=chance).cumsum(-1).neg()
    tree, _ = pack(candidate_nodes(beam, scores)[0], torch.randint(9, (rows,), generator=chance), budget)
    return tree


def test_a_node_sees_the_text_and_its_path() -> None:
    tree, lengths = random_trees(3), torch.tensor([40, 3, 0])
    flat, at = of_trees(tree, lengths, longest=1000)
    want = tree_visibility(lengths, tree.mask, SLOTS)
    got = visible(flat.lines, SLOTS)[at]
    assert torch.equal(got[tree.valid], want[tree.valid])
    assert torch.equal(flat.tokens[at][tree.valid], tree.tokens[tree.valid])
    assert torch.equal(flat.positions[at], torch.where(tree.valid, lengths[:, None] + tree.depths, lengths[:, None]))
    wrong = replace(tree, mask=tree.mask.roll(1, 0))  # twin: the ancestors of the neighbour's row
    other, where = of_trees(wrong, lengths, longest=1000)
    assert not torch.equal(visible(other.lines, SLOTS)[where][tree.valid], want[tree.valid])


def test_no_node_stands_at_a_position_above_the_last() -> None:
    tree, lengths = random_trees(3), torch.tensor([40, 3, 0])
    flat, at = of_trees(tree, lengths, longest=41)
    index = (lengths[:, None] + tree.depths)[tree.valid]
    assert index.max() > 41
    assert torch.equal(flat.positions[at][tree.valid], index.clamp(max=41))
    assert torch.equal(flat.lines[at, INDEX][tree.valid], index), "what it sees goes on"


def test_dropped_nodes_take_no_line_and_no_slot_of_others() -> None:
    tree, lengths = random_trees(3), torch.tensor([20, 9, 30])
    assert tree.scores is not None
    real = budgeted(tree, ranks(tree, tree.scores), 10)
    flat = Flat.empty(20, 3, "cpu")
    at = put_trees(flat, tree, real, lengths, torch.tensor([5, 6, 7]), 1000, begin=2, run=0)
    assert flat.runs[:, 1].sum() == real.sum() == 13
    assert sorted(at[real].tolist()) == list(range(2, 15))
    assert torch.equal(flat.lines[at[real], SLOT], (lengths[:, None] + torch.arange(tree.nodes + 1))[real])
    assert flat.lines[at[real], PLACE].unique().tolist() == [5, 6, 7]
    assert not visible(flat.lines, SLOTS)[15:].any(), "padding sees nothing"
    assert (flat.lines[15:, SLOT] == -1).all()


@pytest.mark.parametrize("nodes", [0, 1, 7, 20, 36])
def test_the_budget_keeps_the_most_probable_nodes_and_their_parents(nodes: int) -> None:
    tree = random_trees(3, seed=nodes)
    assert tree.scores is not None
    kept = budgeted(tree, ranks(tree, tree.scores), nodes)
    assert kept[:, 0].all()
    drafted = tree.valid.clone()
    drafted[:, 0] = False
    assert kept[:, 1:].sum() == min(nodes, int(drafted.sum()))
    assert (kept.gather(1, tree.parents) | ~kept).all(), "closed under parents"
    if kept[:, 1:].any() and (drafted & ~kept).any():
        assert tree.scores[kept & drafted].min() >= tree.scores[drafted & ~kept].max()


def test_twin_a_score_above_the_parents_drops_the_parent() -> None:
    tree = random_trees(2)
    assert tree.scores is not None
    raised = torch.where(tree.depths == 2, 1.0, tree.scores)
    kept = budgeted(tree, ranks(tree, raised), 3)
    assert (kept & ~kept.gather(1, tree.parents)).any()


def test_pieces_see_what_comes_before() -> None:
    flat = of_pieces([Piece(2, 30, [4, 5, 6]), Piece(0, 0, [7, 8])], longest=31, tokens=8, runs=3)
    seen = visible(flat.lines, SLOTS)
    assert [int(row.sum()) for row in seen] == [31, 32, 33, 1, 2, 0, 0, 0]
    assert flat.lines[:5, INDEX].tolist() == [30, 31, 32, 0, 1]
    assert flat.positions[:5].tolist() == [30, 31, 31, 0, 1], "no position above the last"
    assert flat.runs.tolist() == [[0, 3], [3, 2], [0, 0]]
    assert flat.lines[:5, TOKEN].tolist() == [4, 5, 6, 7, 8]


def test_any_mixture_gives_what_each_row_gets_alone() -> None:
    chance = random.Random(1)
    torch.manual_seed(1)
    for _ in range(30):
        rows, heads, kv_heads, size = chance.randint(1, 4), 4, 2, 8
        tree = random_trees(
            rows, chance.randint(1, 4), chance.randint(1, 5), chance.randint(1, 12), chance.randrange(99)
        )
        lengths = torch.tensor([chance.randrange(60) for _ in range(rows)])
        keys, values = torch.randn(2, rows + 1, kv_heads, SLOTS, size).double()
        piece = Piece(rows, chance.randrange(20), [1] * chance.randint(1, 9))
        area, extra = tree.tokens.numel(), of_pieces([piece], 1000)
        flat = Flat.empty(area + len(extra.lines) + 3, rows + 1, "cpu")
        at = put_trees(Flat(flat.lines[:area], flat.runs[:rows]), tree, tree.valid, lengths, torch.arange(rows), 1000)
        flat.lines[area : area + len(extra.lines)] = extra.lines
        flat.runs[rows] = torch.tensor([area, len(extra.lines)])
        query = torch.randn(len(flat.lines), heads, size).double()
        got = naive.attend(query, keys, values, flat.lines, flat.runs, 0.3)
        for row in range(rows):
            alone, where = of_trees(keep(tree, row), lengths[row : row + 1], 1000, torch.tensor([row]))
            mine = torch.zeros(len(alone.lines), heads, size).double()
            mine[where[0][tree.valid[row]]] = query[at[row][tree.valid[row]]]
            want = naive.attend(mine, keys, values, alone.lines, alone.runs, 0.3)
            torch.testing.assert_close(got[at[row]][tree.valid[row]], want[where[0]][tree.valid[row]])
        assert not got[area + len(extra.lines) :].any()


def keep(tree: Tree, row: int) -> Tree:
    fields = {name: getattr(tree, name)[row : row + 1] for name in ("tokens", "parents", "depths", "valid", "mask")}
    return Tree(**fields, length=tree.length)


def test_padding_writes_no_key() -> None:
    flat = of_pieces([Piece(1, 2, [4, 5])], 1000, tokens=5)
    keys, values = torch.zeros(2, 2, 1, 6, 3)
    naive.write(torch.ones(5, 1, 3), torch.ones(5, 1, 3), keys, values, flat.lines)
    assert keys.sum() == values.sum() == 6
    assert keys[1, 0, 2:4].sum() == 6


def test_what_budgets_promise_is_the_sum_of_the_nodes_that_they_keep() -> None:
    tree, budgets = random_trees(3), torch.tensor([0, 4, 9, 36])
    assert tree.scores is not None
    place = ranks(tree, tree.scores)
    told = promised(tree, tree.scores, place, budgets)
    for i, nodes in enumerate(budgets.tolist()):
        kept = budgeted(tree, place, nodes) & (tree.depths > 0)
        likely = (0.85 * tree.scores).exp().minimum(0.98**tree.depths)
        assert torch.allclose(told[:, i], (likely * kept).sum(1))
    assert (told.diff(dim=1) >= 0).all()
    wrong = promised(tree, tree.scores.roll(1, 1), place, budgets)  # twin: the probabilities of other nodes
    assert not torch.allclose(wrong, told)
    nothing = promised(tree, torch.full_like(tree.scores, torch.nan), place, budgets)
    assert (nothing == 0).all(), "a number that is none promises nothing"
