"""A chain mixed into the beam: the mixture itself, and the tree that comes out."""

from dataclasses import replace

import pytest
import torch

from redrafter import RuleConfig, SamplingParams, Shape
from redrafter.core import beam as beam_module
from redrafter.core.chain import Chain
from redrafter.core.rules import make_rule
from redrafter.core.sampling import Sampling
from redrafter.core.tree import Tree
from redrafter.kernels.beam_topk import extend, extend_with_chain

VOCAB, ROWS, WIDTH, LENGTH, DEEP = 11, 6, 4, 3, 7
IDS = torch.tensor([9, 0, 3, 7, 4, 1])
"""A draft vocabulary."""


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def integers(seed: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def problem(seed: int, ids: torch.Tensor | None, temperature: float):
    """Beams at one depth, as `extend` takes them, and a chain that beam 2 (of every second row) follows."""
    logits = 2 * drawn(seed, ROWS, WIDTH, VOCAB if ids is None else len(ids))
    noise = drawn(seed + 1, ROWS, VOCAB) * (temperature > 0)
    heat = torch.full((ROWS,), temperature, dtype=torch.float64)
    follows = torch.zeros(ROWS, WIDTH, dtype=torch.bool)
    follows[::2, 2] = True
    beams = (logits, drawn(seed + 2, ROWS, WIDTH), heat, noise, ids, WIDTH)
    return beams, integers(seed + 3, VOCAB, ROWS), drawn(seed + 4, ROWS).sigmoid(), follows


def mixture(beams, token, odds, follows):
    """By definition: log_softmax(log((1 - odds) · p + odds · [token]) + noise) over the whole vocabulary."""
    logits, total, heat, noise, ids, width = beams
    ids = torch.arange(VOCAB) if ids is None else ids
    p = torch.zeros(ROWS, WIDTH, VOCAB, dtype=torch.float64)
    p[..., ids] = (logits / torch.where(heat > 0, heat, 1.0)[:, None, None]).softmax(-1)
    weight = (odds[:, None] * follows)[..., None]
    p = (1 - weight) * p + weight * torch.nn.functional.one_hot(token, VOCAB)[:, None]
    scores = total[..., None] + (p.log() + noise[:, None]).log_softmax(-1)
    best, flat = scores.flatten(1).topk(width)
    return best, flat // VOCAB, flat % VOCAB


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("ids", [None, IDS], ids=["all tokens", "a draft vocabulary"])
def test_the_mixture_is_the_one_defined(ids, temperature):
    outside = inside = 0
    for seed in range(0, 400, 10):
        beams, token, odds, follows = problem(seed, ids, temperature)
        best, parents, tokens, still = extend_with_chain(*beams, token, odds, follows)
        expected = mixture(beams, token, odds, follows)
        torch.testing.assert_close(best, expected[0])
        assert torch.equal(parents, expected[1])
        assert torch.equal(tokens, expected[2])
        on_chain = follows.gather(1, parents) & (tokens == token[:, None])
        assert torch.equal(still, on_chain)
        guessable = torch.ones(ROWS, dtype=torch.bool) if ids is None else torch.isin(token, ids)
        inside += int((still.any(1) & guessable).sum())
        outside += int((still.any(1) & ~guessable).sum())
    assert inside > 20
    assert outside > 20 or ids is None, "else copied tokens outside the draft vocabulary were not tested"


def test_mixing_after_the_noise_would_be_noticed():
    beams, token, odds, follows = problem(0, None, 0.8)
    logits, total, heat, noise, ids, width = beams
    silent = extend_with_chain(logits, total, heat, torch.zeros_like(noise), ids, width, token, odds, follows)
    assert not torch.equal(silent[0], mixture(beams, token, odds, follows)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_odds_or_off_the_chain_nothing_changes(dtype):
    (logits, total, heat, noise, ids, width), token, odds, follows = problem(3, IDS, 1.0)
    beams = (logits.to(dtype), total.to(dtype), heat, noise.to(dtype), ids, width)
    plain = extend(*beams)
    for chance, where in ((0 * odds, follows), (odds, follows & False)):
        for mine, theirs in zip(extend_with_chain(*beams, token, chance, where), plain, strict=False):
            assert torch.equal(mine, theirs)
    changed = extend_with_chain(*beams, token, odds, follows)[0]
    assert torch.equal(changed[1::2], plain[0][1::2])
    assert not torch.equal(changed[::2], plain[0][::2])


def tree_of(seed: int, chain: Chain | None, shape: Shape, temperature: float = 1.0, ids=IDS) -> Tree:
    table = 2 * drawn(seed, VOCAB, len(ids))
    rule = make_rule(RuleConfig(), shape, VOCAB, torch.float64)
    params = [SamplingParams(temperature=temperature)] * ROWS
    search = rule.search(Sampling.of(params, VOCAB, "cpu"), torch.arange(ROWS), torch.arange(ROWS) + 5)

    def advance(state, tokens, parents):
        return table[tokens], state

    return replace(search, chain=chain).tree(advance, None, integers(seed, VOCAB, ROWS), ids)


def random_chain(seed: int) -> Chain:
    odds = 0.5 + drawn(seed, ROWS, DEEP).sigmoid() / 2.1
    odds[1::2] = 0  # every second row has no chain
    return Chain(integers(seed + 1, VOCAB, ROWS, DEEP), odds)


SHAPES = [
    Shape(width=4, length=3, nodes=9),
    Shape(width=4, length=3),
    Shape(width=1, length=3, nodes=2),
    Shape(width=6, length=1),
    Shape(width=1, length=9),
]


def problems_of(tree: Tree, budget: int) -> list[str]:
    """What is wrong with a tree; nothing, if nothing is."""
    found = []
    for row in range(len(tree.tokens)):
        nodes = [n for n in range(1, tree.tokens.shape[1]) if bool(tree.valid[row, n])]
        parents = {n: int(tree.parents[row, n]) for n in nodes}
        if len(nodes) > budget:
            found.append("too many nodes")
        if any(p >= n or (p and p not in parents) for n, p in parents.items()):
            found.append("a node without its parent")
        if len({(p, int(tree.tokens[row, n])) for n, p in parents.items()}) < len(nodes):
            found.append("a node twice")
        if any(int(tree.depths[row, n]) != int(tree.depths[row, p]) + 1 for n, p in parents.items()):
            found.append("a wrong depth")
        if any(int(tree.mask[row, n].sum()) != int(tree.depths[row, n]) + 1 for n in nodes):
            found.append("a wrong mask")
    return found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.label)
def test_the_tree_is_a_tree_within_the_budget(shape, temperature):
    deepest = 0
    for seed in range(30):
        tree = tree_of(seed, random_chain(seed), shape, temperature)
        assert problems_of(tree, shape.budget) == []
        assert bool(tree.valid[:, -1].all()), "the whole budget is used"
        deepest = max(deepest, int((tree.depths * tree.valid).max()))
    assert deepest > shape.length or shape.budget <= shape.length or shape.length > DEEP


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.label)
def test_a_row_without_a_chain_gets_the_beam_alone(shape):
    changed = False
    for seed in range(10):
        alone, mixed = tree_of(seed, None, shape), tree_of(seed, random_chain(seed), shape)
        for name in ("tokens", "parents", "depths", "valid", "mask"):
            assert torch.equal(getattr(mixed, name)[1::2], getattr(alone, name)[1::2]), name
        changed |= not torch.equal(mixed.tokens[::2], alone.tokens[::2])
    assert changed, "rows with a chain must differ, else nothing was tested"


def test_a_likely_chain_is_in_the_tree_to_its_end():
    chain = Chain(integers(0, VOCAB, ROWS, DEEP), torch.full((ROWS, DEEP), 0.99))
    tree = tree_of(0, chain, Shape(width=4, length=3, nodes=9), temperature=0.0)
    for row in range(ROWS):
        paths = [tree.tokens[row][tree.mask[row, n]][1:].tolist() for n in range(1, 10)]
        assert chain.tokens[row].tolist() in paths


def test_a_node_that_both_sources_guess_counts_once(monkeypatch):
    """The twin: the chain's token beside the beam's own copy of it is two nodes."""

    def twice(*args):
        *beams, token, odds, follows = args
        best, parents, tokens = extend(*beams)
        beam = follows.int().argmax(1, keepdim=True)
        own = follows.any(1) & (odds > 0)
        tokens[:, -1] = torch.where(own, token, tokens[:, -1])
        parents[:, -1] = torch.where(own, beam[:, 0], parents[:, -1])
        last = torch.arange(best.shape[1]) == best.shape[1] - 1
        return best, parents, tokens, own[:, None] & last

    shape = Shape(width=4, length=3)
    assert not any(problems_of(tree_of(s, random_chain(s), shape, 0.0), 12) for s in range(20))
    monkeypatch.setattr(beam_module, "extend_with_chain", twice)
    assert any("a node twice" in problems_of(tree_of(s, random_chain(s), shape, 0.0), 12) for s in range(20))
