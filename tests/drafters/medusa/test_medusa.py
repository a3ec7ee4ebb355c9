"""Medusa: its tree, the accuracies it is chosen from, and the depths it can be asked for."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from redrafter import Engine, Shape
from redrafter.config import RuleConfig
from redrafter.core.fixed_tree import FixedTree, sparse_tree
from redrafter.drafters.medusa.loss import rank_accuracies
from redrafter.drafters.options import DrafterOptions
from redrafter.errors import ConfigError
from redrafter.targets import Target, load_target
from redrafter.train.batches import make_batch
from redrafter.train.setup import make_net
from redrafter.train.trainer import train
from tests.helpers.toys import CONFIG, make_texts
from tests.helpers.zoo import PROMPTS, make_model, peer_drafter

OPTIONS = DrafterOptions(drafter="medusa", exit_size=48, draft_vocab=0, heads=3)


def test_medusa_cannot_be_asked_for_more_depths_than_it_has():
    target = load_target(make_model())
    rule = RuleConfig(name="rejection", branching=(1,) * 5)
    engine = Engine(target, peer_drafter("medusa", target), shape=Shape(width=1, length=5), rule=rule)
    with pytest.raises(ConfigError, match="guesses 4 tokens ahead"):
        engine.generate(PROMPTS[0], max_new_tokens=12)


def test_sparse_tree_is_the_best_of_all():
    accuracies = [[0.5, 0.2, 0.1], [0.4, 0.3, 0.05], [0.3, 0.1, 0.1]]

    def worth(tree):
        return sum(math.prod(accuracies[d][r] for d, r in enumerate(path)) for path in tree)

    every = [p for n in (1, 2, 3) for p in itertools.product(range(3), repeat=n)]
    for nodes in (1, 2, 3, 4):
        closed = [t for t in itertools.combinations(every, nodes) if all(p[:-1] in ((), *t) for p in t)]
        best = max(worth(t) for t in closed)
        assert worth(sparse_tree(accuracies, 3, 3, nodes)) == pytest.approx(best)
    assert all(max(p) < 2 and len(p) < 3 for p in sparse_tree(accuracies, 2, 2, 99))


def test_fixed_tree_holds_the_tokens_of_its_paths():
    paths = sparse_tree([[0.5, 0.3], [0.6, 0.2]], 2, 2, 4)
    best = torch.tensor([[[5, 6], [7, 8]], [[1, 2], [3, 4]]])
    tree = FixedTree.of(paths, best.device).fill(best, torch.tensor([0, 9]))
    for row in range(2):
        for path in paths:
            node = 1 + paths.index(path)
            above = [j for j in range(1, 5) if tree.mask[row, node, j]]
            assert [int(tree.tokens[row, j]) for j in above] == [int(best[row, d, r]) for d, r in enumerate(path)]


def test_rank_accuracies_are_those_of_the_guesses():
    target = Target(make_model(dtype=torch.float32))
    net = make_net(target, data := make_texts(target), OPTIONS, seed=0)
    batch = make_batch(data, list(range(8)))
    found = rank_accuracies(net, target, [batch])
    states = target.states(batch.tokens, (-1,))
    hits = torch.zeros(3)
    for row, at in zip(batch.row.tolist(), batch.at.tolist(), strict=True):
        for d in range(3):
            if at + 2 + d < int(batch.lengths[row]):
                logits = net.features(states[row, at][None])[d, 0] @ target.output_embedding.weight.T
                hits[d] += int(logits.argmax()) == int(batch.tokens[row, at + 2 + d])
    counts = torch.stack([(batch.left > d).sum() for d in range(3)])
    assert torch.allclose(found[:, 0], hits / counts)
    assert bool((found.sum(1) <= 1).all())


def test_a_network_for_each_depth(tmp_path):
    target = Target(make_model("llama", torch.float32))
    with pytest.raises(ConfigError, match="give --heads and --depth alike"):
        train(target, make_texts(target), tmp_path, options=OPTIONS, config=replace(CONFIG, depth=2))
