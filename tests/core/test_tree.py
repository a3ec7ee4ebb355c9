import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from redrafter.core.beam import Beam, beam_search, candidates, visited_nodes
from redrafter.core.rules.seeded import accept_seeded
from redrafter.core.tree import Tree, dedup_prefix, pack, pack_beam, unpack_beam

PAPER = torch.tensor([[91, 92, 93, 95], [91, 92, 94, 96], [91, 92, 93, 97]])
PAPER_TREE = [[0, 0, 0, 0], [0, 0, 1, 1], [0, 0, 0, 2]]


def test_dedup_prefix_gives_the_papers_example_in_a_batch():
    other = torch.tensor([[1, 2, 3, 4], [5, 2, 3, 4], [1, 2, 9, 4]])
    result = dedup_prefix(torch.stack([PAPER, other]))
    assert result[0].tolist() == PAPER_TREE
    assert result[1].tolist() == [[0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 2, 2]]


def test_twin_the_listing_as_printed_does_not():
    beam = PAPER
    matches = beam[:, :, None] == beam[:, None, :]  # a row against itself
    seq = torch.cumsum(matches, dim=2) == torch.arange(1, beam.shape[1] + 1)[None, None, :]
    assert torch.argmax(seq.int(), dim=2).tolist() != PAPER_TREE


def test_papers_figure_packs_15_tokens_to_8():
    """Three candidates of five tokens, as in their figure 4."""
    beam = torch.tensor([[[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 7, 8]]])
    tree, _ = pack_beam(beam, torch.tensor([0]))
    assert int(tree.valid.sum()) - 1 == 8


beams = st.integers(1, 6).flatmap(
    lambda w: st.integers(1, 5).flatmap(
        lambda n: st.lists(
            st.lists(st.lists(st.integers(0, 2), min_size=n, max_size=n), min_size=w, max_size=w),
            min_size=1,
            max_size=3,
        )
    )
)


@given(beams)
@settings(max_examples=150, deadline=None)
def test_pack_beam_is_a_trie_and_back(rows):
    beam = torch.tensor(rows)
    tree, place = pack_beam(beam, torch.full((len(rows),), 9))
    assert torch.equal(unpack_beam(tree.tokens, place), beam)
    for row, paths in enumerate(rows):
        trie = {tuple(p[: i + 1]) for p in paths for i in range(len(p))}
        assert int(tree.valid[row].sum()) - 1 == len(trie)
        seen = set()
        for node in range(1, tree.nodes + 1):
            if not bool(tree.valid[row, node]):
                assert not bool(tree.valid[row, node:].any()), "empty nodes stand last"
                break
            path = node_path(tree, row, node)
            seen.add(tuple(path))
            assert int(tree.depths[row, node]) == len(path)
            assert int(tree.parents[row, node]) < node
        assert seen == trie


def node_path(tree: Tree, row: int, node: int) -> list[int]:
    """Tokens below the root, by the mask; checked against the parents."""
    by_mask = tree.mask[row, node].nonzero()[:, 0].tolist()
    by_parents = [node]
    while by_parents[-1]:
        by_parents.append(int(tree.parents[row, by_parents[-1]]))
    assert by_mask == by_parents[::-1]
    return tree.tokens[row, by_mask[1:]].tolist()


def searched(batch: int, width: int, length: int, vocab: int, seed: int, scale: float = 1.0) -> Beam:
    """A beam search over a random table."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(vocab, vocab, generator=generator) * scale

    def advance(state, tokens, parents):
        return table[tokens], state

    return beam_search(
        advance,
        None,
        torch.arange(batch) % vocab,
        width=width,
        length=length,
        temperature=torch.zeros(batch),
        noise=torch.zeros(batch, length + 1, vocab),
    )


shapes = st.tuples(st.integers(1, 6), st.integers(1, 5), st.integers(6, 9), st.integers(0, 10_000), st.floats(0, 20))


@given(shapes, st.integers(1, 40))
@settings(max_examples=200, deadline=None)
def test_budget_keeps_a_set_closed_under_parents(shape, budget):
    width, length, vocab, seed, scale = shape
    beam = searched(3, width, length, vocab, seed, scale)
    nodes = visited_nodes(beam)
    tree, place = pack(nodes, torch.zeros(3, dtype=torch.long), min(budget, width * length))
    for row in range(3):
        kept = [i + 1 for i in range(width * length) if int(place[row, i + 1])]
        for old in kept:
            parent = int(nodes.parents[row, old - 1])
            assert parent == 0 or parent in kept
        for node in range(1, tree.nodes + 1):
            node_path(tree, row, node)


def test_twin_without_the_lowered_scores_rounding_breaks_the_closure():
    """A child one rounding above its parent, and a budget that falls between them."""
    from redrafter.core.tree import Nodes

    tokens = torch.tensor([[1, 2]])
    nodes = Nodes(tokens, torch.tensor([[0, 1]]), torch.tensor([[1, 2]]), torch.tensor([[-2.0, -1.9999999]]), 2)
    tree, _ = pack(nodes, torch.tensor([0]), 1)
    assert tree.tokens.tolist() == [[0, 1]], "the parent, though the child scores higher"
    naive = nodes.scores.sort(descending=True).indices[:, :1]
    assert naive.tolist() == [[1]]


@given(shapes)
@settings(max_examples=60, deadline=None)
def test_full_budget_loses_nothing(shape):
    width, length, vocab, seed, scale = shape
    beam = searched(2, width, length, vocab, seed, scale)
    tree, _ = pack(visited_nodes(beam), torch.zeros(2, dtype=torch.long), width * length)
    for row in range(2):
        assert bool(tree.valid[row].all())
        got = sorted(tuple(node_path(tree, row, n)) for n in range(1, width * length + 1))
        expected = []
        for depth, w in itertools.product(range(length), range(width)):
            path, at = [], w
            for d in range(depth, -1, -1):
                path.append(int(beam.tokens[row, d, at]))
                at = int(beam.parents[row, d, at])
            expected.append(tuple(path[::-1]))
        assert got == sorted(expected)
        assert len(set(got)) == len(got), "unique from birth"


@given(shapes)
@settings(max_examples=60, deadline=None)
def test_final_beams_never_accept_more_than_all_visited_nodes(shape):
    width, length, vocab, seed, scale = shape
    beam = searched(4, width, length, vocab, seed, scale)
    last = torch.arange(4) % vocab
    generator = torch.Generator().manual_seed(seed + 1)
    table = torch.randn(vocab, vocab, generator=generator)
    full, _ = pack(visited_nodes(beam), last, width * length)
    final, _ = pack_beam(candidates(beam), last)

    def accepted(tree: Tree) -> torch.Tensor:
        return accept_seeded(table[tree.tokens].argmax(-1), tree).count

    assert bool((accepted(final) <= accepted(full)).all())


def test_candidates_trace_back():
    beam = searched(2, 4, 3, 6, seed=3)
    paths = candidates(beam)
    assert paths.shape == (2, 4, 3)
    assert torch.equal(paths[:, :, -1], beam.tokens[:, -1])
    first = beam.tokens[:, 0].gather(1, beam.parents[:, 1].gather(1, beam.parents[:, 2]))
    assert torch.equal(paths[:, :, 0], first)


@pytest.mark.parametrize("width", [1, 4])
def test_budget_prefers_probable_nodes(width):
    beam = searched(1, width, 3, 6, seed=5)
    nodes = visited_nodes(beam)
    _, place = pack(nodes, torch.tensor([0]), 2)
    kept = place[0, 1:] > 0
    assert nodes.scores[0][kept].min() >= nodes.scores[0][~kept].max()
