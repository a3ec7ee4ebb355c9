"""Noise, beams, trees, chains, sampling and acceptance equal those of redrafter's torch core."""

import mlx.core as mx
import numpy as np
import pytest
import torch
from conftest import to_mlx

from redrafter import config as torch_config
from redrafter.core import accept as torch_accept
from redrafter.core import beam as torch_beam
from redrafter.core import chain as torch_chain
from redrafter.core import noise as torch_noise
from redrafter.core import sampling as torch_sampling
from redrafter.core import tree as torch_tree
from redrafter.core.rules import seeded as torch_seeded
from redrafter.drafters import ngram as torch_ngram
from redrafter.drafters import with_ngrams
from redrafter.kernels.verify.naive import seeded as torch_choices
from redrafter_mlx import accept, beam, ngram, noise, tree
from redrafter_mlx.config import SamplingParams, Shape
from redrafter_mlx.errors import ConfigError

SEEDS = [0, 7, -1, 2**63 - 1, 2**64 - 3]
POSITIONS = torch.tensor([[0, 1, 17], [3, 4, 5], [100, 2, 9], [0, 0, 1], [70000, 70001, 2**30]])


def test_noise_is_the_same_bit_for_bit(same):
    seeds = torch.tensor([torch_noise.as_int64(s) for s in SEEDS])
    keys = torch_noise._key(seeds, torch_noise.SEEDED, POSITIONS)
    offsets = torch_noise._offsets(50, keys.device)
    oracle = torch_noise._shift(torch_noise.mix(keys[..., None] + offsets), 11)
    own = noise.as_seeds(SEEDS), to_mlx(POSITIONS), 50
    counters = noise.counters(*own)
    np.testing.assert_array_equal(np.array(noise.bits(counters)).astype(np.int64), oracle.numpy())
    u = torch_noise.uniform(seeds, POSITIONS, 50, stream=torch_noise.SEEDED, dtype=torch.float32)
    np.testing.assert_array_equal(np.array(noise.uniform(counters)), u.numpy())
    same(noise.gumbel(*own), torch_noise.gumbel(seeds, POSITIONS, 50, stream=torch_noise.SEEDED, dtype=torch.float32))


def random_nodes(generator, batch=3, width=3, length=4, empties=True):
    beam_tokens = torch.randint(6, (batch, width, length), generator=generator)
    scores = -torch.rand(batch, width, length, generator=generator).cumsum(-1)
    scores = (scores * 4).round() / 4  # many ties
    if empties:
        scores[0, 2, 2:] = -torch.inf
    return torch_tree.candidate_nodes(beam_tokens, scores)


@pytest.mark.parametrize("budget", [1, 4, 7, 12, 40])
def test_packed_trees(budget, same):
    generator = torch.Generator().manual_seed(budget)
    last = torch.tensor([4, 5, 9])
    for _ in range(5):
        nodes, _ = random_nodes(generator)
        oracle, place = torch_tree.pack(nodes, last, budget)
        fields = {n: to_mlx(getattr(nodes, n)) for n in ("tokens", "parents", "depths", "scores")}
        own, own_place = tree.pack(tree.Nodes(**fields, length=nodes.length), to_mlx(last), budget)
        for name in ("tokens", "parents", "depths", "valid", "mask"):
            same(getattr(own, name), getattr(oracle, name))
        same(own_place, place)
        assert (own.length, own.nodes) == (oracle.length, oracle.nodes)


def test_the_papers_packing(same):
    """Apple's published worked example of a prefix tree, and random beams."""
    published = mx.array([[[91, 92, 93, 95], [91, 92, 94, 96], [91, 92, 93, 97]]])
    assert tree.dedup_prefix(published).tolist() == [[[0, 0, 0, 0], [0, 0, 1, 1], [0, 0, 0, 2]]]
    packed, place = tree.pack_beam(published, mx.array([90]))
    kept = int(packed.valid.astype(mx.int32).sum()) - 1
    assert kept == 7, "12 tokens, 7 of them different prefixes"
    assert packed.tokens[0, 1 : kept + 1].tolist() == [91, 92, 93, 94, 95, 96, 97]
    assert tree.gather(packed.tokens, place.reshape(1, -1)).reshape(1, 3, 4).tolist() == published.tolist()
    beams = torch.randint(3, (4, 5, 4), generator=torch.Generator().manual_seed(0))
    last = torch.zeros(4, dtype=torch.long)
    oracle, oracle_place = torch_tree.pack_beam(beams, last, 9)
    own, own_place = tree.pack_beam(to_mlx(beams), to_mlx(last), 9)
    same(own.tokens, oracle.tokens)
    same(own.mask, oracle.mask)
    same(own_place, oracle_place)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("mixes", [False, True])
@pytest.mark.parametrize("draft_vocabulary", [False, True])
def test_beams_and_their_trees(temperature, mixes, draft_vocabulary, same):
    """The same search over a table of logits, with a chain of copied tokens mixed in or without."""
    generator = torch.Generator().manual_seed(5)
    batch, vocab, width, length = 4, 23, 3, 4
    ids = torch.tensor([1, 2, 3, 5, 8, 13, 21, 0]) if draft_vocabulary else None
    size = vocab if ids is None else len(ids)
    table = torch.randn(vocab, size, generator=generator) * 2
    own_table = to_mlx(table)
    seeds = torch.arange(batch)
    drawn = torch_noise.gumbel(
        seeds, torch.arange(length + 1).expand(batch, -1), vocab, stream=0, dtype=torch.float32
    ) * (temperature > 0)
    odds = torch.rand(batch, 6, generator=generator)
    odds[0], odds[3] = 0.98, 0
    tokens = torch.randint(vocab, (batch, 6), generator=generator)
    last = torch.randint(vocab, (batch,), generator=generator)
    guess = torch_chain.Chain(tokens, odds) if mixes else None
    oracle = torch_beam.beam_search(
        lambda state, tokens, parents: (table[tokens], state), None, last, width=width, length=length,
        temperature=torch.full((batch,), temperature), noise=drawn, token_ids=ids, chain=guess,
    )  # fmt: skip
    if mixes:
        assert oracle.follows.any(), "some beam follows the chain to the end"
    for budget in (3, 7, 12):
        expected = torch_beam.visited_nodes(oracle, guess and guess.upto(budget))
        cut = max(length, budget)
        own = beam.beam_search(
            lambda state, tokens, parents: (own_table[tokens], state),
            to_mlx(last),
            beam.Search(Shape(width=width, length=length), temperature, to_mlx(drawn) if temperature else None),
            None if ids is None else to_mlx(ids),
            beam.Chain(to_mlx(tokens[:, :cut]), to_mlx(odds[:, :cut])) if mixes else None,
        )
        for name in ("tokens", "parents", "depths", "scores"):
            same(getattr(own, name), getattr(expected, name))
        assert own.length == expected.length
        packed, _ = torch_tree.pack(expected, last, budget)
        mine, _ = tree.pack(own, to_mlx(last), budget)
        for name in ("tokens", "parents", "depths", "valid", "mask"):
            same(getattr(mine, name), getattr(packed, name))


def test_a_beam_wider_than_the_vocabulary_is_refused():
    with pytest.raises(ConfigError, match="beam width 9"):
        beam.beam_search(
            lambda state, tokens, parents: (mx.zeros((1, 1, 4)), state),
            mx.array([0]),
            beam.Search(Shape(width=9, length=1), 0.0, None),
        )


def test_accepted_paths(same):
    generator = torch.Generator().manual_seed(3)
    last = torch.tensor([1, 2, 3])
    longest = 0
    for budget in (4, 12):
        for _ in range(20):
            nodes, _ = random_nodes(generator)
            packed, _ = torch_tree.pack(nodes, last, budget)
            choice = torch.randint(6, packed.tokens.shape, generator=generator)
            oracle = torch_seeded.accept_seeded(choice, packed)
            fields = {n: to_mlx(getattr(packed, n)) for n in ("tokens", "parents", "depths", "valid", "mask")}
            own = accept.accept_seeded(to_mlx(choice), tree.Tree(**fields, length=packed.length))
            for name in ("path", "tokens", "count", "nodes"):
                same(getattr(own, name), getattr(oracle, name))
            longest = max(longest, int(oracle.count.max()))
    assert longest >= 3
    assert torch_accept.Accepted  # the same class of results


PARAMS = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.3, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.7},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 0.6, "top_k": 9, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 0.0, "repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"temperature": 1.0, "repetition_penalty": 0.8, "top_k": 4},
]


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_choices(params, same):
    generator = torch.Generator().manual_seed(11)
    nodes, _ = random_nodes(generator, empties=False)
    nodes = torch_tree.Nodes(nodes.tokens, nodes.parents, nodes.depths, nodes.scores, nodes.length)
    packed, _ = torch_tree.pack(nodes, torch.tensor([1, 2, 3]), 8)
    logits = torch.randn(3, 9, 20, generator=generator) * 2
    counts = torch.randint(3, (3, 20), generator=generator).float()
    given = torch_sampling.Sampling.of([torch_config.SamplingParams(**params)] * 3, 20, "cpu")
    drawn = torch_noise.gumbel(torch.arange(3), torch.arange(5).expand(3, -1), 20, stream=0, dtype=torch.float32)
    changed = torch_sampling.node_logits(logits, given, counts, packed)
    oracle = torch_choices(changed, packed.depths, given.temperature, drawn, torch_sampling.floor(changed, given))
    fields = {n: to_mlx(getattr(packed, n)) for n in ("tokens", "parents", "depths", "valid", "mask")}
    own = SamplingParams(**params)
    found = accept.target_choices(
        to_mlx(logits),
        tree.Tree(**fields, length=packed.length),
        own,
        to_mlx(drawn) if own.temperature else None,
        to_mlx(counts) if own.penalises else None,
    )
    same(found, oracle)
    if own.top_k or own.top_p < 1 or own.min_p:
        kept = torch_sampling.restrict(logits, given) > -torch.inf
        same(accept.restrict(to_mlx(logits) / own.temperature, own) > -mx.inf, kept)
        assert not kept.all()


def test_ngrams(same):
    """The chain, its odds and the count of hits over many steps, row by row."""
    generator = torch.Generator().manual_seed(2)
    rows = [ngram.Ngrams([1, 2, 3, 1, 2]), ngram.Ngrams([5]), ngram.Ngrams([4, 4, 4])]
    slots = 200
    text = torch_ngram.NgramState(torch.zeros(3, slots, dtype=torch.long), torch.tensor([5, 1, 3]))
    for i, row in enumerate(rows):
        text.tokens[i, : len(row.text)] = torch.tensor(row.text)
    state = (*with_ngrams.find_chain(text), torch.full((3, 2), with_ngrams.PRIOR))
    drafter = torch_ngram.NgramDrafter(with_ngrams.LONGEST, with_ngrams.SHORTEST)
    matched = 0
    for step in range(25):
        tokens, match, hits = state
        matched += int((match > 0).sum())
        for sampled in (False, True):
            odds = with_ngrams.chain_odds(with_ngrams.odds_table(), torch.full((3,), float(sampled)), match, hits)
            for i, row in enumerate(rows):
                same(row.odds(sampled), odds[i], atol=0)
                assert row.match == int(match[i])
                if row.match:
                    assert row.chain == tokens[i].tolist()
        width = 4
        new = torch.randint(3, (3, width), generator=generator)
        if step % 3 == 0:
            new = tokens[:, :width].clone()  # copied tokens that are right
        count = torch.randint(0, width + 1, (3,), generator=generator)
        none = torch.zeros_like(new)
        accepted = torch_accept.Accepted(none, new, count, none[:, 0], none[:, 0])
        hits = with_ngrams.updated_hits(hits, tokens, match, accepted)
        text = drafter.advance(text, accepted, torch.zeros(3, width, 0))
        state = (*with_ngrams.find_chain(text), hits)
        for i, row in enumerate(rows):
            row.advance(new[i, : int(count[i])].tolist())
    assert matched > 20


def test_a_shape_as_text():
    assert Shape.of("3x4:7").label == "3x4:7"
    assert Shape.of("3x4").budget == 12
    for text in ("3", "axb", "0x1", "2x0", "1x1:0"):
        with pytest.raises(ConfigError):
            Shape.of(text)
    for wrong in ({"temperature": -1}, {"top_p": 0}, {"min_p": 2}, {"top_k": -1}, {"temperature": "hot"}):
        with pytest.raises(ConfigError):
            SamplingParams(**wrong)
