"""docs/extending.md, "Add a drafter": the example runs, drafts, and can be trained from the command line's options."""

import copy
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import redrafter
from redrafter import Shape
from redrafter.drafters import registry
from redrafter.drafters.options import DrafterOptions
from redrafter.drafters.training import LossInput
from redrafter.errors import ConfigError
from redrafter.targets import Target
from redrafter.train.batches import make_batch
from redrafter.train.trainer import train
from tests.helpers.toys import CONFIG, make_texts
from tests.helpers.zoo import make_model

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"


@pytest.fixture
def example(monkeypatch):
    """The section's code, run as written. The kind it registers is gone afterwards."""
    monkeypatch.setattr(registry, "_loaded", dict(registry._loaded))
    section = re.search(r"^## Add a drafter\n(.*?)(?=^## |\Z)", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert section is not None
    blocks = re.findall(r"```python\n(.*?)```", section[1], flags=re.DOTALL)
    assert len(blocks) == 2
    torch.manual_seed(0)
    space: dict = {"__name__": "extending_example"}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), space)
    return space


def test_the_example_drafts_and_the_text_is_plain(example):
    engine, plain = example["engine"], example["plain"]
    assert engine.drafter.name == "linear"
    assert type(engine.drafter) is example["LinearDrafter"]
    # The last texts of the loop were sampled; the drafter shares the noise, so some of its guesses are right.
    assert [c.tokens for c in example["drafted"]] == [c.tokens for c in plain]
    assert sum(c.stats.steps for c in example["drafted"]) < sum(c.stats.steps for c in plain)


def test_the_example_learns_from_the_options_of_the_command_line(example, tmp_path):
    target = Target(copy.deepcopy(make_model("llama", torch.float32)))  # training freezes the weights
    data, shape = make_texts(target, count=40), Shape(width=4, length=3)
    options = DrafterOptions(drafter="linear", draft_vocab=0)
    config = replace(CONFIG, updates=40, evaluate_every=20)
    done = train(target, data, tmp_path, options=options, config=config, shape=shape)
    losses = [r["loss"] for r in done.records if "loss" in r]
    assert losses[-1] < losses[0]
    engine = redrafter.load(target.model, drafter=tmp_path, shape=shape)
    assert engine.drafter.name == "linear"
    plain = engine.plain().generate([[1, 2, 3]], max_new_tokens=16)
    assert engine.generate([[1, 2, 3]], max_new_tokens=16)[0].tokens == plain[0].tokens


def test_the_example_trains_what_it_drafts(example):
    """Features of training and of drafting are the same; at depth 1 drafting reads the next token of the text."""
    net, target = example["net"].double(), example["target"]
    batch = make_batch(make_texts(target, count=2), [0, 1])
    states = target.states(batch.tokens, (-1,))
    features, additional = example["training_features"](
        net, LossInput(batch, states, target.input_embedding, [1.0] * 2)
    )
    assert additional is None
    for n, (row, at) in enumerate(zip(batch.row.tolist(), batch.at.tolist(), strict=True)):
        for depth in range(int(batch.left[n].clamp(max=2))):
            embedding = target.input_embedding(batch.tokens[row, at + 1 + depth])
            assert torch.allclose(features[depth, n], net.features(states[row, at], embedding))


def test_names_are_unique(example):
    registry.register(example["KIND"])  # the same kind again is no error: modules may be imported twice
    other = replace(registry.get("medusa"), config=example["LinearConfig"])
    with pytest.raises(ConfigError, match="named 'linear' exists already"):
        registry.register(other)
    with pytest.raises(ConfigError, match="must be one of recurrent, medusa, eagle, linear, got 'cubic'"):
        DrafterOptions(drafter="cubic")
    with pytest.raises(ConfigError, match="--blocks belongs to the recurrent or medusa drafter, not to linear"):
        DrafterOptions(drafter="linear", blocks=3)
