"""Drafting and training compute the same logits, in the kinds whose training runs another code than a draft."""

import pytest
import torch

from redrafter import Shape
from redrafter.core.accept import Accepted
from redrafter.core.tree import root_tree
from redrafter.drafters import registry
from redrafter.drafters.base import output_rows
from redrafter.drafters.block import BlockNet
from redrafter.drafters.decoder import Rotary
from redrafter.drafters.training import LossInput
from redrafter.targets import load_target
from redrafter.train.batches import make_batch
from tests.helpers.toys import make_texts
from tests.helpers.zoo import make_model, peer_drafter

KINDS = {
    "eagle": {},
    "eagle3": {"layers": (1, 2, -1)},
    "block": {"guesses": 4, "layers": (1, 2)},
    "causal block": {"guesses": 4, "causal": True},
    "block with a Markov head": {"guesses": 4, "markov": "gated", "head": "own"},
    "block with a recurrent Markov head": {"guesses": 4, "markov": "rnn", "draft_vocab": 30},
}


class Spelled:
    """A search that follows given tokens, one beam wide, and keeps the logits."""

    shape, visited = Shape(width=1, length=4), 4

    def __init__(self, tokens):
        self.tokens, self.logits = tokens, []

    def tree(self, advance, state, last, token_ids=None):
        token = last[:, None]
        for following in self.tokens:
            logits, state = advance(state, token, torch.zeros_like(token))
            self.logits.append(logits[:, 0])
            token = following
        return root_tree(last)


def trained_and_drafted(name: str, at: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (4, V) for the tokens after position `at` as training computes them, and as drafting does."""
    target = load_target(make_model())
    drafter = peer_drafter("block" if "block" in name else name, target, **KINDS[name])
    net = drafter.net
    data = make_texts(target, count=1)
    batch = make_batch(data, [0])
    hidden = target.states(batch.tokens, net.config.layers)
    forward = registry.get(net.config.kind).features
    features, _ = forward(net, LossInput(batch, hidden, target.input_embedding, [1.0] * 4))
    place = batch.at.tolist().index(at)
    trained = features[:, place] @ net.training_vocabulary(output_rows(net, target)).T
    # The prompt, then the accepted tokens, in steps of two: (hidden states, the tokens that they chose).
    lengths = torch.tensor([3])
    state = drafter.begin(batch.tokens[:, :3], lengths, hidden[:, :3], 64)
    for t in range(2, at + 1, 2):
        count = min(2, at + 1 - t)
        tokens = batch.tokens[:, t + 1 : t + 3]
        accepted = Accepted(tokens, tokens, torch.tensor([count]), torch.tensor([0]), torch.tensor([0]))
        state = drafter.advance(state, accepted, hidden[:, t : t + 2])
    search = Spelled([batch.tokens[:, at + 2 + d, None] for d in range(4)])
    drafter.draft(state, batch.tokens[:, at + 1], search)
    return trained, torch.cat(search.logits)


@pytest.mark.parametrize("at", [2, 5, 8])
@pytest.mark.parametrize("name", KINDS)
def test_it_drafts_as_it_was_trained(name, at):
    trained, drafted = trained_and_drafted(name, at)
    assert torch.allclose(trained, drafted, atol=1e-6)


def test_twin_eagle_with_wrong_positions_does_not(monkeypatch):
    rotations = Rotary.forward
    calls = []

    def late(self, positions, dtype):
        calls.append(0)
        return rotations(self, positions + (len(calls) > 4 + 1), dtype)  # after training's depths and the prompt

    monkeypatch.setattr(Rotary, "forward", late)
    trained, drafted = trained_and_drafted("eagle", 5)
    assert not torch.allclose(trained, drafted, atol=1e-3)


@pytest.mark.parametrize("wrong", ["a slot sees those behind it", "the text begins a token later"])
def test_twin_a_block_that_sees_other_tokens_does_not(wrong, monkeypatch):
    visible = BlockNet.visible

    def other(self, layer, last, room):
        text, slots = visible(self, layer, last, room)
        if last.dim() == 1:  # as a draft has it
            return text, slots
        return (text, torch.ones_like(slots)) if wrong.startswith("a slot") else (text.roll(1, -1), slots)

    monkeypatch.setattr(BlockNet, "visible", other)
    trained, drafted = trained_and_drafted("causal block", 5)
    assert not torch.allclose(trained, drafted, atol=1e-3)
