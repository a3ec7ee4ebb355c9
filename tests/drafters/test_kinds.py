"""What holds for every trained kind besides the recurrent one: exact text, training, checkpoints."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import redrafter
from redrafter import Engine, Shape
from redrafter.config import RuleConfig
from redrafter.drafters import NoDrafter, checkpoint
from redrafter.drafters.load import bind
from redrafter.drafters.options import DrafterOptions
from redrafter.errors import ConfigError
from redrafter.targets import Target, load_target
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
    "eagle3": DrafterOptions(drafter="eagle3", exit_size=64, draft_vocab=0),
    "block": DrafterOptions(drafter="block", exit_size=64, draft_vocab=0, blocks=1, guesses=3),
    "block, causal, with a Markov head": DrafterOptions(
        drafter="block", exit_size=64, draft_vocab=30, blocks=1, guesses=3, causal=True, markov="gated"
    ),
}


def texts(engine: Engine, **options):
    return [c.tokens for c in engine.generate(PROMPTS, max_new_tokens=20, **options)]


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
    """What a GPU records: the same texts in the same steps, run after run; no budget cuts what rows would share."""
    target = load_target(make_model())
    drafter, shape = peer_drafter(kind, target), Shape(width=3, length=4)
    eager, fixed = (Engine(target, drafter, shape=shape, runtime="graphs") for _ in range(2))
    fixed.recorded = True
    for prompts in (PROMPTS, PROMPTS[:1], PROMPTS):
        a, b = (e.generate(list(prompts), max_new_tokens=20, **options) for e in (eager, fixed))
        assert [c.tokens for c in a] == [c.tokens for c in b]
        assert [c.stats.accepted_per_step for c in a] == [c.stats.accepted_per_step for c in b]
    assert fixed.recorded


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


@pytest.mark.parametrize("kind", OPTIONS)
def test_it_learns(tmp_path: Path, kind: str) -> None:
    target = Target(make_model("llama", torch.float32))
    whole = make_texts(target, count=64)
    data, held = whole.select(range(40)), whole.select(range(40, 64))
    config = replace(CONFIG, updates=60, evaluate_every=20)
    shape = Shape(width=4, length=3)
    done = train(target, data, tmp_path, options=OPTIONS[kind], config=config, shape=shape)
    losses = [r["loss"] for r in done.records if "loss" in r]
    assert losses[-1] < losses[0]
    before = simulate(target, bind(make_net(target, data, OPTIONS[kind], 0), target), held, shape)
    engine = redrafter.load(target.model, drafter=tmp_path, shape=shape)
    assert engine.drafter.name == kind.split(",")[0]
    after = simulate(target, engine.drafter, held, shape)
    assert after.tokens_per_step > before.tokens_per_step + 0.1
    for options in ({}, HOT):
        drafted = engine.generate(PROMPTS, max_new_tokens=20, **options)
        assert [c.tokens for c in drafted] == texts(engine.plain(), **options)
        assert sum(c.stats.accepted for c in drafted) > 0


@pytest.mark.parametrize("kind", ["eagle3", "block, causal, with a Markov head"])
def test_resumed_bit_for_bit(tmp_path: Path, kind: str, monkeypatch) -> None:
    target = Target(make_model("llama", torch.float32))
    data, config = make_texts(target), replace(CONFIG, updates=6, checkpoint_every=2, evaluate_every=3)
    train(target, data, tmp_path / "whole", options=OPTIONS[kind], config=config)
    train(target, data, tmp_path / "parts", options=OPTIONS[kind], config=config)
    last = "checkpoints/update-00000006"
    shutil.rmtree(tmp_path / "parts" / last)
    before = (tmp_path / "parts/checkpoints/update-00000004/state.safetensors").read_bytes()
    train(target, data, tmp_path / "parts", options=OPTIONS[kind], config=config)
    whole, parts = ((tmp_path / name / last / "state.safetensors").read_bytes() for name in ("whole", "parts"))
    assert whole == parts
    assert whole != before, "else nothing was learned after the checkpoint"


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
        ({"drafter": "eagle3", "markov": "rnn"}, "--markov belongs to the block drafter"),
        ({"drafter": "hydra"}, "must be one of recurrent, medusa, eagle"),
    ],
)
def test_options_that_do_not_fit(options, message):
    with pytest.raises(ConfigError, match=message):
        DrafterOptions(**options)


def test_a_block_drafter_learns_as_far_as_it_guesses(tmp_path: Path) -> None:
    target = Target(make_model("llama", torch.float32))
    with pytest.raises(ConfigError, match="guesses 3 tokens at once and cannot learn a depth of 2; give --depth 3"):
        train(target, make_texts(target), tmp_path, options=OPTIONS["block"], config=replace(CONFIG, depth=2))
