"""The state of every drafter: tensors of fixed shape with rows as first axis, and at most KV caches beside them."""

from dataclasses import fields, is_dataclass

import pytest
import torch
from torch import Tensor

from redrafter import RuleConfig, SamplingParams, Shape
from redrafter.core.accept import Accepted
from redrafter.core.cache import KVCache
from redrafter.core.rules import make_rule
from redrafter.core.sampling import Sampling
from redrafter.drafters import ModelDrafter, NgramDrafter, NoDrafter, WithNgrams
from redrafter.targets import load_target
from tests.helpers.zoo import PROMPTS, VOCAB, make_model, peer_drafter, recurrent_drafter

SLOTS, SHAPE = 64, Shape(width=3, length=3)
DRAFTERS = {
    "none": lambda t: NoDrafter(),
    "ngram": lambda t: NgramDrafter(2, 1),
    "recurrent": lambda t: recurrent_drafter(t),
    "memory": lambda t: recurrent_drafter(t, memory_heads=2, memory_size=8),
    "recurrent+ngram": lambda t: WithNgrams(recurrent_drafter(t, memory_heads=2, memory_size=8)),
    "medusa": lambda t: peer_drafter("medusa", t),
    "eagle": lambda t: peer_drafter("eagle", t),
    "eagle3": lambda t: peer_drafter("eagle3", t),
    "block": lambda t: peer_drafter("block", t, markov="rnn"),
    "model": lambda t: ModelDrafter(t, t),
}


@pytest.fixture(scope="module")
def target():
    return load_target(make_model())


@pytest.fixture(params=DRAFTERS)
def drafter(request, target):
    return DRAFTERS[request.param](target)


def parts(state) -> list[Tensor | KVCache]:
    """The tensors and caches of a state, in order; nothing else may be in it."""
    if state is None:
        return []
    if isinstance(state, Tensor | KVCache):
        return [state]
    assert is_dataclass(state), f"a state may not hold a {type(state).__name__}"
    return [x for f in fields(state) for x in parts(getattr(state, f.name))]


def shapes(state) -> list:
    return [x.shape if isinstance(x, Tensor) else [(t.shape, x.slots) for t in x.tensors()] for x in parts(state)]


@torch.no_grad()
def begun(target, drafter, texts: list[list[int]]):
    """State, last tokens, lengths and draft of rows whose last two tokens were accepted after the prompt."""
    prompts = [t[:-2] for t in texts]
    width = max(len(p) for p in prompts)
    tokens = torch.tensor([p + [0] * (width - len(p)) for p in prompts])
    lengths = torch.tensor([len(p) for p in prompts])
    hidden = target.states(tokens, drafter.layers) if drafter.layers else torch.zeros(len(texts), width, 0)
    state = drafter.begin(tokens, lengths, hidden, SLOTS)
    for i in (-2, -1):
        new = torch.tensor([[t[i], 7] for t in texts])
        one = torch.ones(len(texts), dtype=torch.long)
        own = [torch.Generator().manual_seed(sum(t) + i) for t in texts]  # each text has hidden states of its own
        chose = torch.stack([torch.randn(2, hidden.shape[2], dtype=hidden.dtype, generator=g) for g in own])
        # A drafter drafts between any two calls of `advance`.
        state = drafter.advance(state, Accepted(0 * new, new, one, 0 * one, 0 * one), chose)
        tree = drafter.draft(state, new[:, 0], search(lengths + 3 + i))
    return state, new[:, 0], lengths + 2, tree


RULE, GREEDY = make_rule(RuleConfig(), SHAPE, VOCAB, torch.float64), SamplingParams()


def search(lengths: Tensor):
    return RULE.search(Sampling.of([GREEDY] * len(lengths), VOCAB, "cpu"), 0 * lengths, lengths)


@torch.no_grad()
def test_shapes_are_fixed(target, drafter):
    state, *_ = begun(target, drafter, PROMPTS[2:])
    again, last, lengths, _ = begun(target, drafter, [p + p for p in PROMPTS[2:]])
    assert shapes(state) == shapes(again), "whatever the texts' lengths"
    assert all(
        x.shape[0] == 3 for part in parts(state) for x in ([part] if isinstance(part, Tensor) else part.tensors())
    )
    for width in (1, 3):
        new = torch.ones(3, width, dtype=torch.long)
        accepted = Accepted(0 * new, new, new[:, 0], 0 * new[:, 0], 0 * new[:, 0])
        context = target.hidden_size * len(drafter.layers)
        state = drafter.advance(state, accepted, torch.zeros(3, width, context, dtype=torch.float64))
        drafter.draft(state, last, search(lengths + width))
        assert shapes(state) == shapes(again), "whatever was accepted"


@torch.no_grad()
def test_a_row_can_move_into_another_batch(target, drafter):
    """A row begun alone takes the place of another row; its guesses are those it made alone."""
    texts = [[*p, *PROMPTS[0]] for p in PROMPTS]
    alone, last, lengths, expected = begun(target, drafter, [texts[4]])
    batch, lasts, all_lengths, before = begun(target, drafter, texts[:3])
    for whole, new in zip(parts(batch), parts(alone), strict=True):
        if isinstance(whole, KVCache):
            whole.place(new, torch.tensor([1]))
        else:
            whole[1] = new[0]
    lasts[1], all_lengths[1] = last[0], lengths[0]
    tree = drafter.draft(batch, lasts, search(all_lengths))
    assert torch.equal(tree.tokens[1], expected.tokens[0])
    assert torch.equal(tree.valid[1], expected.valid[0])
    for row in (0, 2):
        assert torch.equal(tree.tokens[row], before.tokens[row]), "the neighbours keep their guesses"
    if not isinstance(drafter, NoDrafter):
        assert not torch.equal(before.tokens[1], expected.tokens[0]), "else nothing was tested"


@torch.no_grad()
def test_kept_rows_guess_as_before(target, drafter):
    def next_tree(state, rows):
        new = torch.full((len(rows), 1), 5)
        context = torch.full((len(rows), 1, target.hidden_size * len(drafter.layers)), 0.5, dtype=torch.float64)
        one, zero = torch.ones_like(rows), torch.zeros_like(rows)
        state = drafter.advance(state, Accepted(0 * new, new, one, zero, zero), context)
        return drafter.draft(state, new[:, 0], search(lengths[rows] + 1))

    state, _, lengths, _ = begun(target, drafter, PROMPTS[2:])
    again, *_ = begun(target, drafter, PROMPTS[2:])
    rows = torch.tensor([2, 0])
    whole, kept = next_tree(state, torch.arange(3)), next_tree(drafter.keep(again, rows), rows)
    assert torch.equal(kept.tokens, whole.tokens[rows])
    assert torch.equal(kept.valid, whole.valid[rows])


@torch.no_grad()
def test_a_traced_draft_multiplies_the_context_once(target, monkeypatch):
    """Dynamo does not know what `functools.cache` has cached: a product in it would be traced once per level."""
    drafter = recurrent_drafter(target)
    state, last, lengths, expected = begun(target, drafter, PROMPTS[2:])
    share, calls = drafter.net.share, []
    monkeypatch.setattr(drafter.net, "share", lambda context: (calls.append(1), share(context))[1])
    found = torch.compile(lambda: drafter.draft(state, last, search(lengths)).tokens, backend="eager")()
    assert torch.equal(found, expected.tokens)
    assert len(calls) == 1
