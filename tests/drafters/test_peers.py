"""Medusa and EAGLE as drafters: exact like ours, trained like ours, and what each of them promises of itself."""

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import redrafter
from redrafter import Engine, Shape
from redrafter.config import RuleConfig
from redrafter.core.accept import Accepted
from redrafter.core.fixed_tree import FixedTree, sparse_tree
from redrafter.core.tree import root_tree
from redrafter.drafters import NoDrafter, checkpoint
from redrafter.drafters.load import bind
from redrafter.errors import ConfigError
from redrafter.nets import eagle as eagle_module
from redrafter.runtime.compiled import Programs
from redrafter.targets import Target, load_target
from redrafter.train.batches import make_batch
from redrafter.train.config import DrafterOptions
from redrafter.train.lesson import Lesson, guesses, rank_accuracies
from redrafter.train.setup import make_net
from redrafter.train.trainer import train
from redrafter.tuning.simulate import simulate
from tests.helpers.toys import CONFIG, make_texts
from tests.helpers.zoo import ARCHITECTURES, PROMPTS, make_model, peer_drafter

KINDS = ("medusa", "eagle")
SHAPES = (Shape(width=1, length=3), Shape(width=4, length=4, nodes=9), Shape(width=3, length=2))
HOT = {"temperature": 1.0, "seed": 5, "repetition_penalty": 1.3, "presence_penalty": 0.4}
OPTIONS = {
    "medusa": DrafterOptions(drafter="medusa", exit_size=48, draft_vocab=0, heads=3),
    "eagle": DrafterOptions(drafter="eagle", exit_size=64, draft_vocab=0),
}


def texts(engine: Engine, **options):
    return [c.tokens for c in engine.generate(PROMPTS, max_new_tokens=20, **options)]


# --- exactness ---


@pytest.mark.parametrize("options", [{}, HOT], ids=["greedy", "hot"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("kind", KINDS)
def test_speculative_is_plain(kind, arch, options):
    target = load_target(make_model(arch))
    plain = texts(Engine(target, NoDrafter()), **options)
    drafter = peer_drafter(kind, target, draft_vocab_size=30)
    for shape in SHAPES:
        assert texts(Engine(target, drafter, shape=shape), **options) == plain, shape


@pytest.mark.parametrize("options", [{}, HOT], ids=["greedy", "hot"])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_over_fixed_buffers(kind, options):
    """What a GPU records: the same texts in the same steps, run after run."""
    target = load_target(make_model())
    drafter, shape = peer_drafter(kind, target), Shape(width=3, length=4, nodes=9)
    eager, fixed = (Engine(target, drafter, shape=shape) for _ in range(2))
    fixed.programs = Programs(target, drafter, fixed.rule, compiles=False)
    for prompts in (PROMPTS, PROMPTS[:1], PROMPTS):
        a, b = (e.generate(list(prompts), max_new_tokens=20, **options) for e in (eager, fixed))
        assert [c.tokens for c in a] == [c.tokens for c in b]
        assert [c.stats.accepted_per_step for c in a] == [c.stats.accepted_per_step for c in b]
    assert not fixed.programs.hopeless


@pytest.mark.parametrize("kind", KINDS)
def test_guesses_do_not_depend_on_the_batch(kind):
    """Rows come and go; what is left of a row's state must be its own."""
    target = load_target(make_model())
    engine = Engine(target, peer_drafter(kind, target), shape=Shape(width=4, length=4))
    together = engine.generate(PROMPTS, max_new_tokens=20, **HOT)
    for prompt, own in zip(PROMPTS, together, strict=True):
        alone = engine.generate(prompt, max_new_tokens=20, **HOT)
        assert alone.stats.accepted_per_step == own.stats.accepted_per_step
    assert max(c.stats.tokens_per_step for c in together) > 1.2, "else nothing was tested"


@pytest.mark.parametrize("kind", KINDS)
def test_rejection(kind):
    target = load_target(make_model())
    rule = RuleConfig(name="rejection", branching=(2, 2))
    engine = Engine(target, peer_drafter(kind, target), shape=Shape(width=2, length=2), rule=rule)
    greedy = Engine(target, NoDrafter()).generate(PROMPTS, max_new_tokens=12)
    assert [c.tokens for c in engine.generate(PROMPTS, max_new_tokens=12)] == [c.tokens for c in greedy]
    assert len(engine.generate(PROMPTS[0], max_new_tokens=12, **HOT).tokens) == 12


def test_medusa_cannot_be_asked_for_more_depths_than_it_has():
    target = load_target(make_model())
    rule = RuleConfig(name="rejection", branching=(1,) * 5)
    engine = Engine(target, peer_drafter("medusa", target), shape=Shape(width=1, length=5), rule=rule)
    with pytest.raises(ConfigError, match="guesses 4 tokens ahead"):
        engine.generate(PROMPTS[0], max_new_tokens=12)


# --- Medusa's tree ---


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
    net = make_net(target, data := make_texts(target), OPTIONS["medusa"], seed=0)
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


# --- EAGLE's layer ---


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


def trained_and_drafted(at: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (4, V) for the tokens after position `at` as training computes them, and as drafting does."""
    target = load_target(make_model())
    drafter = peer_drafter("eagle", target)
    data = make_texts(target, count=1)
    batch = make_batch(data, [0])
    hidden = target.states(batch.tokens, (-1,))
    features, _ = guesses(drafter.net, Lesson(batch, hidden, target.input_embedding, [1.0] * 4))
    place = batch.at.tolist().index(at)
    trained = features[:, place] @ target.output_embedding.weight.T
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
def test_eagle_drafts_as_it_was_trained(at):
    trained, drafted = trained_and_drafted(at)
    assert torch.allclose(trained, drafted, atol=1e-6)


def test_twin_eagle_with_wrong_positions_does_not(monkeypatch):
    turns = eagle_module.EagleNet._turns
    calls = []

    def late(self, positions, dtype):
        calls.append(0)
        return turns(self, positions + (len(calls) > 4 + 1), dtype)  # after training's depths and the prompt

    monkeypatch.setattr(eagle_module.EagleNet, "_turns", late)
    trained, drafted = trained_and_drafted(5)
    assert not torch.allclose(trained, drafted, atol=1e-3)


# --- training and files ---


@pytest.mark.parametrize("kind", KINDS)
def test_it_learns(tmp_path: Path, kind: str) -> None:
    target = Target(make_model("llama", torch.float32))
    data = make_texts(target, count=40)
    config = replace(CONFIG, updates=60, evaluate_every=20)
    shape = Shape(width=4, length=3)
    done = train(target, data, tmp_path, options=OPTIONS[kind], config=config, shape=shape)
    losses = [r["loss"] for r in done.records if "loss" in r]
    assert losses[-1] < losses[0]
    before = simulate(target, bind(make_net(target, data, OPTIONS[kind], 0), target), data, shape)
    engine = redrafter.load(target.model, drafter=tmp_path, shape=shape)
    assert engine.drafter.name == kind
    after = simulate(target, engine.drafter, data, shape)
    assert after.tokens_per_step > before.tokens_per_step + 0.1
    plain = engine.plain().generate([[1, 2, 3]], max_new_tokens=16)
    assert engine.generate([[1, 2, 3]], max_new_tokens=16)[0].tokens == plain[0].tokens


@pytest.mark.parametrize("storage", ["exact", "int8"])
@pytest.mark.parametrize("kind", KINDS)
def test_round_trip(tmp_path, kind, storage):
    target = load_target(make_model())
    drafter = peer_drafter(kind, target, draft_vocab_size=20)
    if kind == "medusa":
        drafter.net.accuracies.copy_(torch.rand(4 * 16))
    checkpoint.write(tmp_path, drafter.net, target, storage=storage)
    again = redrafter.load(target.model, drafter=tmp_path).drafter
    assert type(again) is type(drafter)
    assert again.net.config == drafter.net.config
    for name, weight in drafter.net.state_dict().items():
        near = 0.0 if storage == "exact" or weight.dim() != 2 else 0.02
        assert torch.allclose(again.net.state_dict()[name].to(weight), weight, atol=near), name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drafter": "medusa", "cell": "rnn"}, "--cell belongs to the recurrent drafter"),
        ({"drafter": "hydra"}, "must be one of recurrent, medusa, eagle"),
    ],
)
def test_options_that_do_not_fit(options, message):
    with pytest.raises(ConfigError, match=message):
        DrafterOptions(**options)


def test_a_network_for_each_depth(tmp_path):
    target = Target(make_model("llama", torch.float32))
    with pytest.raises(ConfigError, match="give --heads and --depth alike"):
        train(target, make_texts(target), tmp_path, options=OPTIONS["medusa"], config=replace(CONFIG, depth=2))
