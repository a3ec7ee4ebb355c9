"""The recurrent drafter's compiled search against the same network in torch."""

from dataclasses import replace

import pytest
import torch

from redrafter import Shape
from redrafter.config import RuleConfig, SamplingParams
from redrafter.core.accept import Accepted
from redrafter.core.chain import Chain
from redrafter.core.rules import make_rule
from redrafter.core.sampling import Sampling
from redrafter.drafters.recurrent import RecurrentConfig, RecurrentDrafter, RecurrentNet
from redrafter.drafters.recurrent import compiled as module
from redrafter.drafters.recurrent.drafter import RecurrentState
from redrafter.errors import ConfigError
from redrafter.kernels.cpu import library
from redrafter.kernels.cpu.matrices import Floats, quantise
from tests.helpers.zoo import VOCAB
from tests.targets.cpu.test_packed import packed

pytestmark = pytest.mark.skipif(library.library() is None, reason="no C++ compiler here")

ROWS = 3


def drafter(monkeypatch, **changes):
    """A drafter whose weights stay floats: the compiled search then rounds neither them nor activations."""
    monkeypatch.setattr(module, "quantise", lambda weights, bits: Floats(weights))
    target = packed("llama")
    sizes = {"state_size": 64, "exit_size": 96, "embedding_size": 32, "context_size": 64, "vocab_size": VOCAB}
    config = RecurrentConfig(
        **sizes | {"layers": (1, -1), "cell": "gated", "first_state": "context", "head": "tied", "normed": True,
                   "memory_heads": 2, "memory_size": 32, "draft_vocab_size": 24} | changes
    )  # fmt: skip
    net = RecurrentNet(config)
    with torch.no_grad():
        for weight in net.parameters():
            weight.normal_(0, 0.4)
    if net.token_ids is not None:
        net.token_ids.copy_(torch.randperm(VOCAB)[:24])
    made = RecurrentDrafter(net, target)
    made.compiled = module.compile_network(made.net, target, made.vocabulary)
    return made


def in_torch(made, call):
    kept, made.compiled = made.compiled, None
    try:
        return call()
    finally:
        made.compiled = kept


@torch.no_grad()
@pytest.mark.parametrize("memory", [2, 0])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_it_drafts_and_advances_as_in_torch(monkeypatch, memory, temperature):
    made = drafter(monkeypatch, memory_heads=memory, **({} if memory else {"draft_vocab_size": None}))
    assert made.compiled is not None
    assert made.default_shape == Shape(width=1, length=4, until=0.5)
    context = made.net.context(torch.randn(ROWS, 64))
    state = RecurrentState(context, torch.randn(ROWS, 2, 32, 32) if memory else None)
    last, lengths, seeds = torch.tensor([1, 2, 3]), torch.tensor([7, 9, 30]), torch.tensor([4, 5, 6])
    sampling = Sampling.of([SamplingParams(temperature=temperature)] * ROWS, VOCAB, "cpu")
    for shape in (Shape(width=1, length=2), Shape(width=4, length=3, nodes=9)):
        rule = make_rule(RuleConfig(), shape, VOCAB, torch.float32)
        ours, theirs = (
            how(made, lambda: made.draft(state, last, rule.search(sampling, seeds, lengths)))  # noqa: B023
            for how in (lambda _, call: call(), in_torch)
        )
        assert torch.equal(ours.tokens, theirs.tokens)
        assert torch.equal(ours.parents, theirs.parents)
    hidden, tokens, zeros = torch.randn(ROWS, 4, 64), torch.randint(VOCAB, (ROWS, 4)), torch.zeros(ROWS, 4).long()
    accepted = Accepted(zeros, tokens, torch.tensor([4, 0, 2]), drafted=zeros[:, 0], nodes=zeros[:, 0])
    wanted = in_torch(made, lambda: made.advance(state, accepted, hidden))
    before = None if state.memory is None else state.memory.clone()
    new = made.advance(state, accepted, hidden)
    assert new is state, "it is overwritten"
    assert torch.allclose(new.context, wanted.context, atol=1e-5)
    if memory:
        assert torch.allclose(new.memory, wanted.memory, atol=1e-4)
        assert torch.allclose(new.memory[1], before[1]), "nothing was accepted in this row"


@torch.no_grad()
@pytest.mark.parametrize("size", [1, 2, 9])
def test_it_reads_prompts_as_in_torch(monkeypatch, size):
    made = drafter(monkeypatch)
    hidden, tokens = torch.randn(ROWS, size, 64), torch.randint(VOCAB, (ROWS, size))
    lengths = torch.tensor([size, 1, max(1, size - 3)])
    new = made.begin(tokens, lengths, hidden, 40)
    wanted = in_torch(made, lambda: made.begin(tokens, lengths, hidden, 40))
    assert torch.equal(new.context, wanted.context)
    assert torch.allclose(new.memory, wanted.memory, atol=1e-4)
    assert not new.memory[1].any(), "a prompt of one token has no pair yet"


@torch.no_grad()
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_chain_is_mixed_in_as_in_torch(monkeypatch, temperature):
    """The chain's token is in the draft vocabulary or not, likely or not, and one row has no chain."""
    made = drafter(monkeypatch)
    state = RecurrentState(made.net.context(torch.randn(ROWS, 64)), torch.randn(ROWS, 2, 32, 32))
    last, lengths, seeds = torch.tensor([1, 2, 3]), torch.tensor([7, 9, 30]), torch.tensor([4, 5, 6])
    sampling = Sampling.of([SamplingParams(temperature=temperature)] * ROWS, VOCAB, "cpu")
    odds = torch.tensor([[0.9], [0.0], [0.3]]).expand(-1, 6)
    seen = set()
    for shape in (Shape(width=1, length=2), Shape(width=4, length=3, nodes=9)):
        search = make_rule(RuleConfig(), shape, VOCAB, torch.float32).search(sampling, seeds, lengths)
        alone = made.draft(state, last, search)
        for _ in range(4):
            mixed = replace(search, chain=Chain(torch.randint(VOCAB, (ROWS, 6)), odds))
            ours = made.draft(state, last, mixed)
            theirs = in_torch(made, lambda: made.draft(state, last, mixed))  # noqa: B023
            assert torch.equal(ours.tokens, theirs.tokens)
            assert torch.equal(ours.parents, theirs.parents)
            assert torch.equal(ours.tokens[1, : alone.tokens.shape[1]], alone.tokens[1]), "a row without a chain"
            seen.add(torch.equal(ours.tokens[0, : alone.tokens.shape[1]], alone.tokens[0]))
    assert False in seen, "twin: the chain was not ignored"


@torch.no_grad()
def test_a_search_ends_where_its_best_path_is_unlikely(monkeypatch):
    made = drafter(monkeypatch)
    state = RecurrentState(made.net.context(torch.randn(ROWS, 64)), torch.randn(ROWS, 2, 32, 32))
    how = {"width": 2, "length": 6, "temperature": torch.zeros(ROWS), "noise": None}
    odds = torch.tensor([0.9, 0.9, 0.6, 0.9, 0.9, 0.9]).expand(ROWS, -1)
    how["chain"] = (torch.randint(VOCAB, (ROWS, 6)), odds)
    tokens, parents, scores, _ = made.compiled.search(state.context, state.memory, torch.tensor([1, 2, 3]), **how)
    best = scores[:, :, 0].exp().amax(0)  # of the most probable row, by depth
    assert best[0] > best[2] > best[5]
    for depth in range(6):
        until = float(best[depth]) * 1.001
        some = made.compiled.search(state.context, state.memory, torch.tensor([1, 2, 3]), **how, until=until)
        assert some[0].shape[1] == depth + 1, "all rows go on until the last of them is unlikely"
        assert torch.equal(some[0], tokens[:, : depth + 1])
        assert torch.equal(some[1], parents[:, : depth + 1])
        assert torch.equal(some[2], scores[:, : depth + 1])


@torch.no_grad()
def test_the_best_guesses_are_scored_with_the_unrounded_vocabulary(monkeypatch):
    made = drafter(monkeypatch)
    rounded = torch.from_numpy(quantise(made.vocabulary.numpy(), 4).dequantise())
    monkeypatch.setattr(module, "quantise", lambda w, bits: quantise(w, 4) if len(w) == 24 else Floats(w))
    state = RecurrentState(made.net.context(torch.randn(ROWS, 64)), torch.randn(ROWS, 2, 32, 32))
    how = {"width": 4, "length": 1, "temperature": torch.zeros(ROWS), "noise": None}

    def scores():
        return made.compiled.search(state.context, state.memory, torch.tensor([1, 2, 3]), **how)[2]

    exact = scores()
    made.compiled = module.compile_network(made.net, made.target, made.vocabulary)
    assert torch.allclose(scores(), exact, atol=1e-4)
    made.compiled = module.compile_network(made.net, made.target, rounded)
    assert not torch.allclose(scores(), exact, atol=1e-3), "twin: 4 bits alone"


def test_twin_another_bias_is_seen(monkeypatch):
    made = drafter(monkeypatch)
    state = RecurrentState(torch.ones(1, 64), torch.zeros(1, 2, 32, 32))
    how = {"width": 3, "length": 3, "temperature": torch.zeros(1), "noise": None}
    before = made.compiled.search(state.context, state.memory, torch.tensor([1]), **how)
    made.net.blocks[0].bias.data[:48] += 3
    after = made.compiled.search(state.context, state.memory, torch.tensor([1]), **how)
    assert not torch.allclose(before[2], after[2])


@pytest.mark.parametrize("change", [{"cell": "rnn"}, {"normed": False}, {"head": "own"}, {"state_size": 48}])
def test_other_networks_run_in_torch(monkeypatch, change):
    assert drafter(monkeypatch, **change).compiled is None


@torch.no_grad()
@pytest.mark.parametrize("chained", [False, True])
def test_scores_that_are_no_numbers_give_some_tokens(monkeypatch, chained):
    """NaN from the target must not make the search read beyond its candidates."""
    made = drafter(monkeypatch)
    chain = (torch.tensor([[3, 1]] * ROWS), torch.full((ROWS, 2), 0.5)) if chained else None
    tokens, parents, scores, _ = made.compiled.search(
        torch.full((ROWS, 64), torch.nan), torch.zeros(ROWS, 2, 32, 32), torch.tensor([1, 2, 3]), width=4, length=2,
        temperature=torch.zeros(ROWS), noise=None, chain=chain,
    )  # fmt: skip
    assert tokens.min() >= 0
    assert tokens.max() < VOCAB
    assert parents.min() >= 0
    assert parents.max() < 4
    assert not scores.isnan().any()


@torch.no_grad()
@pytest.mark.parametrize("token", [-1, VOCAB, 10**12])
def test_tokens_outside_the_vocabulary_are_refused_before_they_become_addresses(monkeypatch, token):
    made = drafter(monkeypatch)
    state = RecurrentState(made.net.context(torch.randn(ROWS, 64)), torch.randn(ROWS, 2, 32, 32))
    last, wrong = torch.tensor([1, 2, VOCAB - 1]), torch.tensor([1, 2, token])
    how = {"width": 2, "length": 2, "temperature": torch.zeros(ROWS), "noise": None}
    odds = torch.zeros(ROWS, 3)
    ids, hidden, count = torch.zeros(ROWS, 4).long(), torch.randn(ROWS, 4, 64), torch.tensor([4, 0, 2])

    def copied(chain):
        return made.compiled.search(state.context, state.memory, last, **how, chain=(chain, odds))

    def taken(tokens):
        return made.compiled.take(hidden, tokens, count, state.context, state.memory)

    def rebuilt(token_ids):
        made.net.token_ids = token_ids
        return module.compile_network(made.net, made.target, made.vocabulary)

    before = state.context.clone()
    for call in (
        lambda: made.compiled.search(state.context, state.memory, wrong, **how),
        lambda: copied(wrong[:, None].expand(-1, 3)),
        lambda: taken(ids.index_fill(1, torch.tensor([3]), token)),
        lambda: rebuilt(made.net.token_ids.index_fill(0, torch.tensor([3]), token)),
    ):
        with pytest.raises(ConfigError, match=f"got a token outside the model's vocabulary of {VOCAB} tokens"):
            call()
    assert torch.equal(state.context, before), "nothing was run"
    copied(last[:, None].expand(-1, 3))
    taken(ids.index_fill(1, torch.tensor([3]), VOCAB - 1))
    with pytest.raises(ConfigError):
        rebuilt(torch.arange(23))
