"""A step on the host gives what a step in tensors gives: texts, statistics, and the state of the drafter."""

import pytest
import torch

from redrafter import Engine, Shape
from redrafter.core.rules.seeded import accept_seeded
from redrafter.core.tree import Nodes, pack, within
from redrafter.drafters import ModelDrafter, NgramDrafter, WithNgrams
from redrafter.runtime import eager
from redrafter.runtime.host_step import walked
from redrafter.targets import load_target
from tests.helpers.zoo import PROMPTS, OracleDrafter, make_model, recurrent_drafter


def test_the_same_path_through_any_tree():
    torch.manual_seed(0)
    depths_seen = set()
    for _ in range(60):
        nodes = Nodes(
            tokens=torch.randint(3, (2, 9)),
            parents=torch.stack([torch.randint(max(1, i // 2 + 1), (2,)) for i in range(9)], 1),
            depths=torch.zeros(2, 9, dtype=torch.long),
            scores=torch.rand(2, 9).log(),
            length=9,
        )
        for node in range(9):
            nodes.depths[:, node] = (
                torch.cat([torch.zeros(2, 1).long(), nodes.depths], 1).gather(1, nodes.parents[:, node : node + 1])[
                    :, 0
                ]
                + 1
            )
        tree, _ = pack(nodes, torch.tensor([1, 2]), 7)
        tree = within(tree, torch.tensor([9, 2]))
        choice = torch.randint(3, tree.tokens.shape)
        wanted = accept_seeded(choice, tree)
        for row in range(2):
            path, tokens = walked(*(x[row].tolist() for x in (choice, tree.tokens, tree.parents, tree.valid)))
            n = int(wanted.count[row])
            assert (path, tokens) == (wanted.path[row, :n].tolist(), wanted.tokens[row, :n].tolist())
            depths_seen.add(n)
    assert depths_seen >= {1, 2, 3}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_same_texts_and_statistics(monkeypatch, temperature):
    target = load_target(make_model())
    options = {"max_new_tokens": 16, "temperature": temperature, "seed": 4}
    texts = [c.tokens for c in Engine(target, NgramDrafter()).plain().generate(PROMPTS, **options)]
    for make in (
        lambda: OracleDrafter(PROMPTS, texts, 0.7),
        lambda: WithNgrams(recurrent_drafter(target)),
        lambda: ModelDrafter(target, target),
    ):
        found = []
        for on_host in (True, False):
            engine = Engine(target, make(), shape=Shape(width=2, length=3, nodes=4))
            with monkeypatch.context() as patch:
                if not on_host:
                    patch.setattr(eager, "runs_on_host", lambda *_: False)
                done = engine.generate(PROMPTS, batch_size=2, **options)
            found.append([(c.tokens, c.stats.steps, c.stats.nodes, c.stats.accepted_per_step) for c in done])
        assert found[0] == found[1]
        assert [tokens for tokens, *_ in found[0]] == texts


def test_trees_with_empty_nodes(monkeypatch):
    """A drafter may use fewer nodes than the shape allows; it is given one hidden state for each new token."""
    target = load_target(make_model())
    options = {"max_new_tokens": 16, "temperature": 1.0, "seed": 4}
    found = []
    for on_host in (True, False):
        drafter = recurrent_drafter(target, memory_heads=2)
        draft, advance, widths = drafter.draft, drafter.advance, []

        def shallow(*given, draft=draft):
            tree = draft(*given)
            return within(tree, torch.ones_like(tree.tokens[:, 0]))

        def take(state, accepted, hidden, advance=advance, widths=widths):
            widths.append((accepted.tokens.shape[1], hidden.shape[1]))
            return advance(state, accepted, hidden)

        monkeypatch.setattr(drafter, "draft", shallow)
        monkeypatch.setattr(drafter, "advance", take)
        engine = Engine(target, drafter, shape=Shape(width=2, length=3))
        with monkeypatch.context() as patch:
            if not on_host:
                patch.setattr(eager, "runs_on_host", lambda *_: False)
            done = engine.generate(PROMPTS, batch_size=2, **options)
        found.append([(c.tokens, c.stats.steps, c.stats.nodes, c.stats.accepted_per_step) for c in done])
        assert all(tokens == states for tokens, states in widths)
    assert found[0] == found[1]
    assert [tokens for tokens, *_ in found[0]] == [c.tokens for c in engine.plain().generate(PROMPTS, **options)]
    assert any(1 in accepted for *_, accepted in found[0])
