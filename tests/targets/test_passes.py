"""What every pass gives, whoever runs it: trees, pieces of prompts, and the logits of a piece."""

import copy

import pytest
import torch

from redrafter.core.cache import KVCache
from redrafter.core.flat import Piece
from redrafter.core.tree import pack_beam
from redrafter.targets import load_target
from redrafter.targets.attention import attention_implementations
from redrafter.targets.cuda.tree_target import TreeTarget
from redrafter.targets.passes import PaddedPass
from redrafter.targets.target import Target
from tests.helpers.zoo import make_model

LAYERS = (1, -1)
ROWS, SLOTS = 4, 48
TEXTS = [[(7 * row + 3 * i) % 39 + 1 for i in range(size)] for row, size in enumerate((30, 12, 21))]
PLACES = (2, 0, 3)
KINDS = {"own attention": PaddedPass, "tree kernel": TreeTarget}


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def made(request):
    return request.param(load_target(copy.deepcopy(make_model("llama", torch.float32))))


def empty(target: Target) -> KVCache:
    cache = KVCache(slots=SLOTS)
    for layer, kinds in target.kv_layout().items():
        keys, values = (torch.zeros(ROWS, heads, SLOTS, size, dtype=d) for heads, size, d, _ in kinds)
        cache.layers[layer] = (keys, values)
    return cache


def alone(target: Target, text: list[int]) -> tuple[torch.Tensor, torch.Tensor, KVCache]:
    """Logits, hidden states and KV cache of a text, by the model's own attention."""
    cache = KVCache(slots=SLOTS)
    (logits,), (hidden,) = target.read(torch.tensor([text]), 0, cache, LAYERS, torch.arange(len(text)))
    return logits, hidden, cache


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("ends", [(40,), (9, 40), (1, 5, 40)], ids=["whole", "in two pieces", "in three"])
def test_pieces_of_several_prompts(made, ends):
    cache, states = empty(made.target), [[], [], []]
    begin = 0
    for end in ends:
        pieces = [Piece(place, begin, t[begin:end]) for place, t in zip(PLACES, TEXTS, strict=True)]
        for own, found in zip(states, made.read(pieces, cache, LAYERS), strict=True):
            own.append(found)
        begin = end
    for place, text, found in zip(PLACES, TEXTS, states, strict=True):
        _, hidden, kept = alone(made.target, text)
        assert close(torch.cat(found), hidden)
        for one, own in zip(cache.tensors(), kept.tensors(), strict=True):
            assert close(one[place, :, : len(text)], own[0, :, : len(text)])
    assert not close(torch.cat(states[0])[1:], torch.cat(states[0])[:-1]), "twin: states of other tokens"


@torch.no_grad()
def test_the_logits_of_a_piece(made):
    cache = empty(made.target)
    made.read([Piece(2, 0, TEXTS[0][:10])], cache, LAYERS)
    logits, hidden = made.score(Piece(2, 10, TEXTS[0][10:]), cache, LAYERS)
    want, states, _ = alone(made.target, TEXTS[0])
    assert close(logits, want[10:])
    assert close(hidden, states[10:])
    other, _ = made.score(Piece(1, 10, TEXTS[0][10:]), cache, LAYERS)
    assert not close(other, want[10:]), "twin: a row whose beginning nobody read"


@torch.no_grad()
def test_a_tree_behind_what_was_read(made):
    target, cache = made.target, empty(made.target)
    made.read([Piece(row, 0, TEXTS[row][:-1]) for row in range(2)], cache, LAYERS)
    beam = torch.tensor([[[3, 5], [3, 6]], [[8, 2], [9, 4]]])
    tree, _ = pack_beam(beam, torch.tensor([TEXTS[0][-1], TEXTS[1][-1]]))
    lengths = torch.tensor([len(TEXTS[0]) - 1, len(TEXTS[1]) - 1])
    logits, hidden = made.verify(tree, lengths, cache.part(0, 2), LAYERS)
    for row in range(2):
        for node in tree.valid[row].nonzero()[:, 0].tolist():
            path = tree.tokens[row, tree.mask[row, node].nonzero()[:, 0]].tolist()
            want, states, _ = alone(target, TEXTS[row][:-1] + path)
            assert close(logits[row, node], want[-1])
            assert close(hidden[row, node], states[-1])


@torch.no_grad()
def test_between_its_passes_the_model_is_its_own(made):
    """A drafter may run the same model within a step."""
    target, cache = made.target, empty(made.target)
    before, want = attention_implementations(target.model), alone(target, TEXTS[1])[0]
    made.read([Piece(0, 0, TEXTS[0])], cache, LAYERS)
    made.score(Piece(1, 0, TEXTS[1]), cache, LAYERS)
    assert attention_implementations(target.model) == before
    assert torch.equal(alone(target, TEXTS[1])[0], want)
    assert not any("forward" in vars(module) for module in target.model.modules())


@torch.no_grad()
def test_what_passes_promise(made):
    """Only mixtures are flat, and an untried pass promises nothing."""
    assert (made.flat is made) == isinstance(made, TreeTarget)
    assert made.same_bits is (None if made.flat else False)
