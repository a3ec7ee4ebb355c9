"""Models with a recurrent state: speculative text == plain text == that of transformers, in fp64."""

import copy
from typing import Any

import pytest
import torch

from redrafter import Engine, Shape
from redrafter.core.recurrence import RecurrentMemory, TreePass
from redrafter.drafters import NgramDrafter, NoDrafter
from redrafter.errors import UnsupportedTarget
from redrafter.targets import Target, load_target
from redrafter.targets import target as target_module
from redrafter.targets.cpu.passes import install_cpu_forwards
from redrafter.targets.recurrence import Mixer
from redrafter.targets.selfcheck import check
from redrafter.targets.tree_levels import tree_levels
from tests.helpers.hybrids import CONFIGS, hybrid, hybrid_model
from tests.helpers.zoo import PROMPTS, OracleDrafter, recurrent_drafter

NEW = 12
SHAPE = Shape(width=3, length=4)
HOT = {"temperature": 1.0, "seed": 5}
SOME = ("qwen3.5", "mamba2", "jamba", "lfm2")


def texts(engine: Engine, prompts: list[list[int]] = PROMPTS, **options: Any) -> list[list[int]]:
    return [c.tokens for c in engine.generate(prompts, max_new_tokens=NEW, **options)]


def guessed(target: Target, plain: list[list[int]], prompts: list[list[int]] = PROMPTS, **options: Any) -> bool:
    """Whether trees that are often right give the same texts."""
    drafter = OracleDrafter(prompts, plain, 0.7)
    return texts(Engine(target, drafter, shape=SHAPE), prompts, **options) == plain


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_family_writes_what_transformers_writes(kind: str) -> None:
    target = hybrid(kind)
    plain = texts(Engine(target, NoDrafter()))
    for prompt, text in zip(PROMPTS, plain, strict=True):
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        whole = target.model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
        assert text == whole[0, len(prompt) :].tolist()
    assert len({tuple(t) for t in plain}) == len(PROMPTS), "the texts must differ for the test to mean anything"
    assert guessed(target, plain)


@pytest.mark.parametrize("kind", [k if k in SOME else pytest.param(k, marks=pytest.mark.slow) for k in CONFIGS])
def test_seeded_texts_and_drafters_that_read_hidden_states(kind: str) -> None:
    target = hybrid(kind)
    plain = texts(Engine(target, NoDrafter()), **HOT)
    assert guessed(target, plain, **HOT)
    for drafter in (recurrent_drafter(target, memory_heads=2, memory_size=8), NgramDrafter(2, 1)):
        assert texts(Engine(target, drafter, shape=SHAPE), **HOT) == plain


def test_penalties_and_one_row_alone() -> None:
    """Penalties take another way through a step than plain rows do on a CPU."""
    target = hybrid("qwen3.5")
    options = HOT | {"repetition_penalty": 1.3, "presence_penalty": 0.4}
    plain = texts(Engine(target, NoDrafter()), **options)
    assert guessed(target, plain, **options)
    for prompt, text in zip(PROMPTS, plain, strict=True):
        assert texts(Engine(target, recurrent_drafter(target), shape=SHAPE), [prompt], **options) == [text]


# Twins: each part, broken on purpose, must break equality or fail the self-check.


def broken(monkeypatch: pytest.MonkeyPatch, where: Any, name: str, new: Any, kind: str = "qwen3.5") -> bool:
    target = hybrid(kind)
    plain = texts(Engine(target, NoDrafter()))
    monkeypatch.setattr(where, name, new)
    with pytest.raises(UnsupportedTarget, match="gives a tree node other logits"):
        check(target)
    return not guessed(target, plain)


def test_the_siblings_state(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_siblings(tree: Any, lengths: Any) -> TreePass:
        """Nodes of one depth take over each other's parents."""
        for level in (order := tree_levels(tree, lengths)).levels:
            if level.parents is not None:
                level.parents.copy_(level.parents.flip(0))
        return order

    assert broken(monkeypatch, target_module, "tree_levels", of_siblings)


def test_a_commit_one_token_short(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = RecurrentMemory.commit
    short = lambda self, path, count: commit(self, path, (count - 1).clamp(min=1) * (count > 0))  # noqa: E731
    assert broken(monkeypatch, RecurrentMemory, "commit", short)


@pytest.mark.parametrize("kind", ["qwen3.5", "lfm2"])
def test_a_convolution_that_sees_the_wrong_ancestor(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    layer = Mixer.layer

    def older(self: Mixer, states: Any) -> Any:
        """The inputs of a convolution one token too old."""
        made = layer(self, states)
        made.conv_states = {k: x if x is None else x.roll(1, -1) for k, x in made.conv_states.items()}
        return made

    assert broken(monkeypatch, Mixer, "layer", older, kind)


@pytest.mark.parametrize("kind", ["mamba2", "qwen3.5", "jamba"])
def test_faster_forwards_of_a_cpu_beside_mixers(kind: str) -> None:
    """A norm that is given a gate looks like one without."""
    target = load_target(hybrid_model(kind, torch.float32))
    before = texts(Engine(target, NoDrafter()))
    chosen = install_cpu_forwards(target)
    assert chosen
    assert not any(name.endswith(("mixer.norm", "linear_attn.norm")) for name in chosen)
    assert texts(Engine(target, NoDrafter())) == before
    assert guessed(target, before)
    target.release()


def test_the_model_is_left_as_it_was() -> None:
    model = hybrid_model("qwen3.5")
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    state = copy.deepcopy(model.state_dict())
    texts(Engine(load_target(model), NgramDrafter(2, 1), shape=SHAPE))
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
    assert all(torch.equal(x, model.state_dict()[name]) for name, x in state.items())
