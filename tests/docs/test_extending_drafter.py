"""docs/extending.md, "Add a drafter": the example runs, drafts, and can be trained from the command line's options."""

import copy
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import redrafter
from redrafter import Shape
from redrafter.core.accept import Accepted
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


def blocks(section: str) -> list[str]:
    """The Python blocks of a section."""
    found = re.search(rf"^### {section}\n(.*?)(?=^##+ |\Z)", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert found is not None
    return re.findall(r"```python\n(.*?)```", found[1], flags=re.DOTALL)


def run(section: str) -> dict:
    """The section's code, run as written."""
    torch.manual_seed(0)
    space: dict = {"__name__": "extending_example"}
    for block in blocks(section):
        exec(compile(block, str(PAGE), "exec"), space)
    return space


@pytest.fixture
def example(monkeypatch):
    """The section on trained kinds. The kind it registers is gone afterwards."""
    monkeypatch.setattr(registry, "_loaded", dict(registry._loaded))
    assert len(blocks("With trained weights")) == 2
    return run("With trained weights")


def test_the_example_without_weights_drafts_and_the_text_is_plain():
    assert len(blocks("Without trained weights")) == 2
    example = run("Without trained weights")
    engine = example["engine"]
    for options in ({}, {"temperature": 1.0, "seed": 7}):
        drafted = engine.generate([[3, 1, 4, 1, 5], [9, 2, 6]], max_new_tokens=60, **options)
        plain = engine.plain().generate([[3, 1, 4, 1, 5], [9, 2, 6]], max_new_tokens=60, **options)
        assert [c.tokens for c in drafted] == [c.tokens for c in plain]
        assert sum(c.stats.accepted for c in drafted) > 0, "some guesses are right"


def test_the_example_without_weights_guesses_what_followed_the_last_time():
    drafter = run("Without trained weights")["FollowDrafter"]()
    state = drafter.begin(torch.tensor([[5, 6, 7, 5, 8, 0], [1, 2, 3, 4, 0, 0]]), torch.tensor([5, 4]), None, 16)
    new = torch.tensor([[6, 9], [4, 9]])  # after 6 came 7, then 5, then 8, then 6; nothing followed the only 4 before
    accepted = Accepted(new, new, torch.tensor([1, 1]), new[:, 0], new[:, 0])
    state = drafter.advance(state, accepted, None)
    asked = {}

    class Search:
        shape = Shape(width=1, length=4)

        def candidates(self, beam, scores, last):
            asked.update(beam=beam, scores=scores, last=last)

    drafter.draft(state, torch.tensor([6, 4]), Search())
    assert asked["last"].tolist() == [6, 4]
    assert asked["beam"][0].tolist() == [[7, 5, 8, 6]]
    assert asked["scores"][0].tolist() == [[0.0] * 4]
    assert asked["beam"][1, 0, 0] == 4, "4 followed 4"


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
    with pytest.raises(ConfigError, match=r"must be one of recurrent, .*block, linear, got 'cubic'"):
        DrafterOptions(drafter="cubic")
    with pytest.raises(ConfigError, match="--memory-heads belongs to the recurrent drafter, not to linear"):
        DrafterOptions(drafter="linear", memory_heads=3)
